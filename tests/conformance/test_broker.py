"""One suite over both brokers: what dispatcher and executor rely on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import aio_pika
import pytest

from aijobs.broker.memory import MemoryBroker
from aijobs.broker.port import (
    LARGEST_BODY,
    Broker,
    Consumer,
    Delivery,
    Message,
    MessageRefused,
    Publisher,
    QueueMissing,
)
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.topology import DEAD_LETTER_QUEUE, DELIVERY_LIMIT, EVENTS_EXCHANGE, WORK_QUEUES

QUEUE = WORK_QUEUES[0]
SOON = timedelta(seconds=10)


class Setting:
    """A broker of one kind, and what only an operator can do to it."""

    broker: Broker

    async def delete_queue(self, name: str) -> None:
        raise NotImplementedError

    async def dead_letters(self, count: int) -> list[bytes]:
        raise NotImplementedError

    async def subscribe(self) -> Callable[[], Awaitable[tuple[str, bytes]]]:
        raise NotImplementedError


class MemorySetting(Setting):
    def __init__(self) -> None:
        self.broker = self._memory = MemoryBroker()

    async def delete_queue(self, name: str) -> None:
        self._memory.delete_queue(name)

    async def dead_letters(self, count: int) -> list[bytes]:
        return [message.body for message in self._memory.dead_letters[:count]]

    async def subscribe(self) -> Callable[[], Awaitable[tuple[str, bytes]]]:
        queue = self._memory.subscribe()

        async def receive() -> tuple[str, bytes]:
            message = await queue.get()
            return message.topic, message.body

        return receive


class RabbitMqSetting(Setting):
    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.broker = RabbitMqBroker([url])
        self._url = url
        self._stack = stack

    async def _channel(self) -> aio_pika.abc.AbstractChannel:
        connection = await aio_pika.connect(self._url)
        await self._stack.enter_async_context(connection)
        return await connection.channel()

    async def delete_queue(self, name: str) -> None:
        await (await self._channel()).queue_delete(name)

    async def dead_letters(self, count: int) -> list[bytes]:
        queue = await (await self._channel()).get_queue(DEAD_LETTER_QUEUE)
        bodies: list[bytes] = []
        async with queue.iterator(timeout=SOON.total_seconds()) as messages:
            async for message in messages:
                bodies.append(message.body)
                await message.ack()
                if len(bodies) == count:
                    break
        return bodies

    async def subscribe(self) -> Callable[[], Awaitable[tuple[str, bytes]]]:
        channel = await self._channel()
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(EVENTS_EXCHANGE, routing_key="ai.job.*")
        arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

        async def receive(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.put_nowait((message.routing_key or "", message.body))

        await queue.consume(receive, no_ack=True)
        return arrived.get


@pytest.fixture(params=["memory", "rabbitmq"])
def rabbitmq_url_or_none(request: pytest.FixtureRequest) -> str | None:
    if request.param == "memory":
        return None
    url: str = request.getfixturevalue("rabbitmq_url")
    return url


@pytest.fixture
async def setting(rabbitmq_url_or_none: str | None) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        if rabbitmq_url_or_none is None:
            yield MemorySetting()
        else:
            yield RabbitMqSetting(rabbitmq_url_or_none, stack)


@pytest.fixture
async def publisher(setting: Setting) -> AsyncIterator[Publisher]:
    publisher = setting.broker.publisher()
    await publisher.connect()
    yield publisher
    await publisher.close()


def message(body: bytes = b"{}", *, queue: str | None = QUEUE, topic: str = "ai.job.enqueue") -> Message:
    return Message(queue=queue, topic=topic, message_id=uuid4().hex, correlation_id="job-1", body=body)


async def receive(consumer: Consumer, count: int) -> list[Delivery]:
    """Receive exactly `count` messages; what is yielded beyond would be lost for the test."""
    received: list[Delivery] = []
    async for delivery in consumer.deliveries():
        received.append(delivery)
        if len(received) == count:
            break
    return received


async def test_what_is_published_arrives_as_it_was(setting: Setting, publisher: Publisher) -> None:
    sent = message(b'{"jobId":"1"}')
    await publisher.publish(sent, SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
        assert (delivery.body, delivery.message_id) == (sent.body, sent.message_id)
        await delivery.ack()


async def test_messages_arrive_in_order(setting: Setting, publisher: Publisher) -> None:
    bodies = [str(number).encode() for number in range(20)]
    for body in bodies:
        await publisher.publish(message(body), SOON)
    async with setting.broker.consumer(QUEUE, 50) as consumer:
        assert [delivery.body for delivery in await receive(consumer, 20)] == bodies


async def test_no_more_than_the_prefetch_is_unsettled(setting: Setting, publisher: Publisher) -> None:
    for number in range(3):
        await publisher.publish(message(str(number).encode()), SOON)
    async with setting.broker.consumer(QUEUE, 2) as consumer:
        deliveries = consumer.deliveries()
        first, _ = await anext(deliveries), await anext(deliveries)
        third = asyncio.ensure_future(anext(deliveries))
        # A full round trip of another message shows that the broker had its time to send the third.
        await publisher.publish(message(queue=WORK_QUEUES[1]), SOON)
        async with setting.broker.consumer(WORK_QUEUES[1], 1) as other:
            await receive(other, 1)
        assert not third.done()
        await first.ack()
        assert (await third).body == b"2"


async def test_unsettled_messages_go_to_somebody_else_when_the_consumer_ends(
    setting: Setting, publisher: Publisher
) -> None:
    """What a kill -9 of an executor looks like to the broker."""
    await publisher.publish(message(b"work"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
    await delivery.ack()  # too late: does nothing, and harms nothing
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (again,) = await receive(consumer, 1)
        assert again.body == b"work"


async def test_an_acknowledged_message_is_gone(setting: Setting, publisher: Publisher) -> None:
    await publisher.publish(message(b"first"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
        await delivery.ack()
        await publisher.publish(message(b"second"), SOON)
        (following,) = await receive(consumer, 1)
        assert following.body == b"second"
        await following.ack()


async def test_a_message_given_back_comes_again(setting: Setting, publisher: Publisher) -> None:
    await publisher.publish(message(b"work"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
        await delivery.requeue()
        (again,) = await receive(consumer, 1)
        assert again.body == b"work"


async def test_a_poison_message_is_put_aside_once(setting: Setting, publisher: Publisher) -> None:
    await publisher.publish(message(b"poison"), SOON)
    await publisher.publish(message(b"good"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
        await delivery.dead_letter()
        (following,) = await receive(consumer, 1)
        assert following.body == b"good"
        assert await setting.dead_letters(1) == [b"poison"]


async def test_a_message_that_is_rejected_too_often_is_put_aside_once(setting: Setting, publisher: Publisher) -> None:
    """QU-1: what cannot be worked on may not go round for ever."""
    await publisher.publish(message(b"hopeless"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        deliveries = consumer.deliveries()
        for _ in range(DELIVERY_LIMIT + 1):
            delivery = await anext(deliveries)
            assert delivery.body == b"hopeless"
            await delivery.reject()
        await publisher.publish(message(b"good"), SOON)
        following = await anext(deliveries)
        assert following.body == b"good"
        assert await setting.dead_letters(1) == [b"hopeless"]
        assert await publisher.depths(SOON) == dict.fromkeys(WORK_QUEUES, 0)


async def test_a_consumer_without_prefetch_receives_nothing_until_it_is_widened(
    setting: Setting, publisher: Publisher
) -> None:
    """Ruling 17: after a reconnect there may be no slot for any message."""
    for number in range(5):
        await publisher.publish(message(str(number).encode()), SOON)
    async with setting.broker.consumer(QUEUE, 0) as consumer:
        assert await publisher.depths(SOON) == {QUEUE: 5, WORK_QUEUES[1]: 0}
        for by, held in ((1, 1), (2, 3)):
            await consumer.widen(by)
            await receive(consumer, by)
            assert (await publisher.depths(SOON))[QUEUE] == 5 - held
        await consumer.stop()
        await publisher.publish(message(), SOON)
        assert (await publisher.depths(SOON))[QUEUE] == 3


async def test_a_missing_work_queue_is_told_and_declared_again(setting: Setting, publisher: Publisher) -> None:
    """OB-4: nobody's fault, and repaired by the next connect."""
    await setting.delete_queue(QUEUE)
    with pytest.raises(QueueMissing):
        await publisher.publish(message(), SOON)
    await publisher.connect()
    await publisher.publish(message(b"works again"), SOON)
    async with setting.broker.consumer(QUEUE, 1) as consumer:
        (delivery,) = await receive(consumer, 1)
        assert delivery.body == b"works again"


async def test_depths_are_those_of_this_moment_and_count_what_waits_alone(
    setting: Setting, publisher: Publisher
) -> None:
    """A queue is kept shallow by what its publisher is told, so a figure that is seconds old is no use."""
    for number in range(1, 31):
        await publisher.publish(message(), SOON)
        assert await publisher.depths(SOON) == {QUEUE: number, WORK_QUEUES[1]: 0}
    await publisher.publish(message(queue=WORK_QUEUES[1]), SOON)
    async with setting.broker.consumer(QUEUE, 10) as consumer:
        await receive(consumer, 10)
        assert await publisher.depths(SOON) == {QUEUE: 20, WORK_QUEUES[1]: 1}


async def test_depths_tell_of_a_missing_queue_and_publishing_goes_on(setting: Setting, publisher: Publisher) -> None:
    await publisher.publish(message(), SOON)
    assert (await publisher.depths(SOON))[QUEUE] == 1
    await setting.delete_queue(QUEUE)
    with pytest.raises(QueueMissing):
        await publisher.depths(SOON)
    await publisher.publish(message(queue=WORK_QUEUES[1]), SOON)  # on the connection that asked
    with pytest.raises(QueueMissing):
        await publisher.depths(SOON)
    await publisher.connect()
    assert await publisher.depths(SOON) == {QUEUE: 0, WORK_QUEUES[1]: 1}


async def test_depths_asked_for_at_the_same_time_do_not_mix(publisher: Publisher) -> None:
    await publisher.publish(message(), SOON)
    depths = await asyncio.gather(*(publisher.depths(SOON) for _ in range(10)))
    assert depths == [{QUEUE: 1, WORK_QUEUES[1]: 0}] * 10


async def test_an_event_needs_no_subscriber(publisher: Publisher) -> None:
    await publisher.publish(message(queue=None, topic="ai.job.completed"), SOON)


async def test_subscribers_get_events_with_their_topic(setting: Setting, publisher: Publisher) -> None:
    receive_event = await setting.subscribe()
    await publisher.publish(message(b'{"jobId":"1"}', queue=None, topic="ai.job.completed"), SOON)
    assert await receive_event() == ("ai.job.completed", b'{"jobId":"1"}')


async def test_a_message_that_no_broker_should_hold_is_refused(publisher: Publisher) -> None:
    with pytest.raises(MessageRefused):
        await publisher.publish(message(b"x" * (LARGEST_BODY + 1)), SOON)
    await publisher.publish(message(), SOON)


async def test_a_stopped_consumer_gets_no_more_but_can_still_settle(setting: Setting, publisher: Publisher) -> None:
    await publisher.publish(message(b"in hand"), SOON)
    async with setting.broker.consumer(QUEUE, 5) as consumer:
        deliveries = consumer.deliveries()
        in_hand = await anext(deliveries)
        following = asyncio.ensure_future(anext(deliveries, None))
        await consumer.stop()
        await publisher.publish(message(b"for others"), SOON)
        async with setting.broker.consumer(QUEUE, 5) as other:
            (taken,) = await receive(other, 1)
            assert taken.body == b"for others"
            await taken.ack()
        assert await following is None
        await in_hand.ack()
    async with setting.broker.consumer(QUEUE, 5) as consumer:
        await publisher.publish(message(b"last"), SOON)
        (delivery,) = await receive(consumer, 1)
        assert delivery.body == b"last", "the message in hand was settled, not given out again"


async def test_many_publishes_at_once_are_all_confirmed(setting: Setting, publisher: Publisher) -> None:
    await asyncio.gather(*(publisher.publish(message(str(number).encode()), SOON) for number in range(50)))
    async with setting.broker.consumer(QUEUE, 50) as consumer:
        received = await receive(consumer, 50)
        assert sorted(int(delivery.body) for delivery in received) == list(range(50))


async def test_the_trace_of_a_message_goes_along(setting: Setting, publisher: Publisher) -> None:
    """OB-9."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for sent in (replace(message(), trace_context=trace), message()):
        await publisher.publish(sent, SOON)
    async with setting.broker.consumer(QUEUE, 2) as consumer:
        received = await receive(consumer, 2)
        assert [delivery.trace_context for delivery in received] == [trace, ""]
        for delivery in received:
            await delivery.ack()
