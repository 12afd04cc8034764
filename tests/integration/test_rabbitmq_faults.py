"""What happens to publishers and consumers when RabbitMQ breaks, and that they work again afterwards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from uuid import uuid4

import aio_pika
import pytest
from structlog.testing import capture_logs

from aijobs.broker.port import BrokerUnavailable, Delivery, Message, TopologyConflict
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.topology import WORK_QUEUES
from deploy.local.ports import free_port
from tests.acceptance.gate import Gate
from tests.acceptance.waiting import until
from tests.alarm import memory_alarm
from tests.conftest import PrivateRabbitMq

QUEUE = WORK_QUEUES[0]
SOON = timedelta(seconds=10)


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(90):
        yield


def message(body: bytes = b"{}") -> Message:
    return Message(queue=QUEUE, topic="", message_id=uuid4().hex, correlation_id="job-1", body=body)


async def one(deliveries: AsyncIterator[Delivery]) -> Delivery:
    delivery = await anext(deliveries)
    await delivery.ack()
    return delivery


async def test_a_queue_deleted_under_a_consumer_is_noticed(rabbitmq_url: str) -> None:
    """The broker cancels the consumer and says so only in a frame that aio-pika does not pass on."""
    broker = RabbitMqBroker([rabbitmq_url])
    async with broker.consumer(QUEUE, 1) as consumer, await aio_pika.connect(rabbitmq_url) as operator:
        receiving = asyncio.ensure_future(anext(consumer.deliveries()))
        await (await operator.channel()).queue_delete(QUEUE)
        with pytest.raises(BrokerUnavailable):
            await receiving
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(b"again"), SOON)
    async with broker.consumer(QUEUE, 1) as consumer:
        assert (await one(consumer.deliveries())).body == b"again"
    await publisher.close()


async def test_a_queue_with_other_arguments_is_one_clear_error(rabbitmq_url: str) -> None:
    async with await aio_pika.connect(rabbitmq_url) as operator:
        await (await operator.channel()).declare_queue(QUEUE, durable=True)
    broker = RabbitMqBroker([rabbitmq_url])
    with pytest.raises(TopologyConflict, match=QUEUE):
        await broker.publisher().connect()
    with pytest.raises(TopologyConflict, match="delete it there"):
        async with broker.consumer(QUEUE, 1):
            pass


async def test_the_next_address_is_tried_when_one_does_not_answer(rabbitmq_url: str) -> None:
    broker = RabbitMqBroker([f"amqp://guest:guest@127.0.0.1:{free_port()}/", rabbitmq_url])
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(), SOON)
    await publisher.close()


async def fails(ask: Callable[[], Awaitable[object]]) -> bool:
    try:
        await ask()
    except BrokerUnavailable:
        return True
    return False


async def test_a_connection_that_is_lost_while_nothing_is_published_is_noticed(rabbitmq_url: str) -> None:
    """Also by whoever asks how deep the queues are before it publishes anything."""
    gate = Gate(rabbitmq_url)
    await gate.open()
    publisher = RabbitMqBroker([gate.url]).publisher()
    for ask in (publisher.connect, lambda: publisher.depths(SOON)):
        await publisher.connect()
        await publisher.depths(SOON)
        await gate.shut()
        await until(partial(fails, ask), "the loss to be noticed")
        with pytest.raises(BrokerUnavailable, match="none of"):
            await publisher.connect()
        await gate.open()
    await publisher.connect()
    await publisher.publish(message(), SOON)
    await publisher.close()
    await gate.shut()


async def test_nobody_answering_is_told_soon() -> None:
    with pytest.raises(BrokerUnavailable, match="none of 1"):
        await RabbitMqBroker([f"amqp://guest:guest@127.0.0.1:{free_port()}/"]).publisher().connect()


async def test_a_killed_broker_is_noticed_and_used_again_after_its_restart(private_rabbitmq: PrivateRabbitMq) -> None:
    server = await private_rabbitmq()
    vhost = "test"
    broker = RabbitMqBroker([await server.create_vhost(vhost)])
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(b"kept"), SOON)
    for queue in WORK_QUEUES:
        await server.until_kept(queue, vhost=vhost)
    async with broker.consumer(WORK_QUEUES[1], 1) as consumer:
        receiving = asyncio.ensure_future(anext(consumer.deliveries()))
        await server.kill()
        with pytest.raises(BrokerUnavailable):
            await receiving
    with pytest.raises(BrokerUnavailable):
        await publisher.publish(message(b"lost"), SOON)
    with pytest.raises(BrokerUnavailable):
        await publisher.connect()
    await server.restart()
    await publisher.connect()
    await publisher.publish(message(b"after"), SOON)
    async with broker.consumer(QUEUE, 5) as consumer:
        deliveries = consumer.deliveries()
        assert [(await one(deliveries)).body for _ in range(2)] == [b"kept", b"after"]

    # A frozen broker confirms nothing: the outcome is unknown, and the wait for it is bounded.
    server.freeze()
    with pytest.raises(BrokerUnavailable, match="unknown"):
        await publisher.publish(message(b"unknown"), timedelta(seconds=1))
    server.thaw()
    await publisher.connect()
    server.freeze()
    with pytest.raises(BrokerUnavailable, match="how many"):
        await publisher.depths(timedelta(seconds=1))
    server.thaw()
    await publisher.connect()
    await publisher.publish(message(b"thawed"), SOON)
    assert (await publisher.depths(SOON))[QUEUE] >= 1
    await publisher.close()


async def test_a_blocked_connection_is_kept_and_flows_again_when_the_alarm_is_over(
    private_rabbitmq: PrivateRabbitMq,
) -> None:
    """OB-4: an alarm of the broker is told by `connect` and by nobody's death."""
    server = await private_rabbitmq()
    publisher = RabbitMqBroker([server.address.url()]).publisher()
    await publisher.connect()
    await publisher.publish(message(b"before"), SOON)
    with capture_logs() as logs:
        async with memory_alarm(server):
            late = [publisher.publish(message(b"late"), timedelta(seconds=2)) for _ in range(20)]
            outcomes = await asyncio.gather(*late, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {BrokerUnavailable}
            for _ in range(3):
                with pytest.raises(BrokerUnavailable, match="alarm"):
                    await publisher.connect()
                with pytest.raises(BrokerUnavailable, match="alarm"):
                    await publisher.depths(SOON)

        async def flows() -> bool:
            try:
                await publisher.connect()
                # The connection was kept, and with it what the broker had not read yet.
                return (await publisher.depths(SOON))[QUEUE] == 21
            except BrokerUnavailable:
                return False

        await until(flows, "what was published during the alarm")
        await publisher.publish(message(b"after"), SOON)
    assert [log["event"] for log in logs if "takes" in log["event"]] == [
        "the broker takes no messages: it has raised an alarm (memory or disk)",
        "the broker takes messages again",
    ]
    await publisher.close()


async def test_addresses_are_tried_in_order_after_each_loss(rabbitmq_url: str) -> None:
    """A publisher and a consumer never stay on an address that is dead, and come back to the first one."""
    first, second = Gate(rabbitmq_url), Gate(rabbitmq_url)
    broker = RabbitMqBroker([first.url, second.url])
    publisher = broker.publisher()

    async def works_through(gate: Gate) -> None:
        await gate.open()
        await publisher.connect()
        await publisher.publish(message(), SOON)
        async with broker.consumer(QUEUE, 1) as consumer:
            deliveries = consumer.deliveries()
            await one(deliveries)
            receiving = asyncio.ensure_future(anext(deliveries))
            await gate.shut()
            with pytest.raises(BrokerUnavailable):
                await receiving
        with pytest.raises(BrokerUnavailable):
            await publisher.publish(message(), SOON)

    await works_through(second)
    await works_through(first)
    await second.open()
    await works_through(first)
    await second.shut()
    with pytest.raises(BrokerUnavailable, match="none of 2"):
        await publisher.connect()
    await works_through(second)
    await publisher.close()
