"""The executor's consumer on a real broker that comes and goes (ruling 17, case B7)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from uuid import uuid4

import aio_pika
import pytest

from aijobs.broker.port import BrokerUnavailable, Message, Publisher
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.topology import WORK_QUEUES
from services.executor.consumer import QueueConsumer
from services.executor.engine.engine import Engine
from tests.acceptance.gate import Gate, Network
from tests.acceptance.waiting import until

QUEUE = WORK_QUEUES[0]
SOON = timedelta(seconds=10)


class HeldEngine(Engine):
    """Runs each job until the test lets it go."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.running = self.most = 0

    async def run(self, job_id: str, *, going_on: Callable[[], bool], held_until: float) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        let_go = asyncio.Event()
        self.started.put_nowait(let_go)
        await let_go.wait()
        self.running -= 1

    async def next(self) -> asyncio.Event:
        async with asyncio.timeout(SOON.total_seconds()):
            return await self.started.get()


@asynccontextmanager
async def consuming(broker: RabbitMqBroker, engine: Engine, slots: int) -> AsyncIterator[QueueConsumer]:
    may_start = asyncio.Event()
    may_start.set()
    consumer = QueueConsumer(broker, QUEUE, slots, engine, timedelta(0), may_start=may_start, hand_back=lambda: None)
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def publisher(rabbitmq_url: str) -> AsyncIterator[Publisher]:
    publisher = RabbitMqBroker([rabbitmq_url]).publisher()
    await publisher.connect()
    yield publisher
    await publisher.close()


async def publish(publisher: Publisher, count: int) -> None:
    for _ in range(count):
        body = json.dumps({"jobId": str(uuid4()), "jobType": "known"}).encode()
        message = Message(queue=QUEUE, topic="", message_id=uuid4().hex, correlation_id="job", body=body)
        await publisher.publish(message, SOON)


async def until_ready(publisher: Publisher, count: int) -> None:
    async def reached() -> bool:
        return (await publisher.depths(SOON))[QUEUE] == count

    await until(reached, f"{count} messages that wait")


async def test_after_a_reconnect_messages_are_held_for_free_slots_alone(
    rabbitmq_url: str, publisher: Publisher
) -> None:
    """The runs of the connection that broke go on, and the broker has their messages again: none of them fits in."""
    gate = Gate(rabbitmq_url)
    await gate.open()
    engine = HeldEngine()
    await publish(publisher, 6)
    async with consuming(RabbitMqBroker([gate.url]), engine, slots=2) as consumer:
        first, second = await engine.next(), await engine.next()
        await until_ready(publisher, 4)
        await gate.shut()
        await until_ready(publisher, 6)
        await until(lambda: not consumer.consuming.is_set(), "the loss to be noticed")
        assert consumer.load().free_slots == 0
        await gate.open()
        first.set()
        third = await engine.next()
        await until_ready(publisher, 5)
        assert consumer.consuming.is_set()
        second.set()
        await engine.next()
        await until_ready(publisher, 4)
        third.set()
        fifth = await engine.next()
        # Acknowledged on the new connection, its room is used again; what the old one held is not held twice.
        await until_ready(publisher, 3)
        fifth.set()
        await engine.next()
        await until_ready(publisher, 2)
    assert engine.most == 2
    await gate.shut()


async def test_a_reconnect_with_some_slots_free_asks_for_those(rabbitmq_url: str, publisher: Publisher) -> None:
    gate = Gate(rabbitmq_url)
    await gate.open()
    engine = HeldEngine()
    async with consuming(RabbitMqBroker([gate.url]), engine, slots=3) as consumer:
        await publish(publisher, 1)
        first = await engine.next()
        await gate.shut()
        await until_ready(publisher, 1)
        await publish(publisher, 5)
        await gate.open()
        await engine.next()
        await engine.next()
        await until_ready(publisher, 4)
        assert (consumer.load().free_slots, engine.started.empty()) == (0, True)
        first.set()
        await engine.next()
        await until_ready(publisher, 3)
    assert engine.most == 3
    await gate.shut()


async def test_a_broker_that_says_nothing_any_more_is_noticed_by_the_check(rabbitmq_url: str) -> None:
    """Case B7: a connection whose network is gone looks open for minutes; new ones work again."""
    network = Network()
    gate = Gate(rabbitmq_url, link=network.link)
    await gate.open()
    broker = RabbitMqBroker([gate.url], check_interval=timedelta(milliseconds=200))
    async with asyncio.timeout(30), broker.consumer(QUEUE, 1) as consumer:
        receiving = asyncio.ensure_future(anext(consumer.deliveries()))
        await until_checked(rabbitmq_url)
        assert not receiving.done()
        network.cut()
        with pytest.raises(BrokerUnavailable):
            await receiving
    network.mend()
    async with asyncio.timeout(10), broker.consumer(QUEUE, 1):
        pass
    await gate.shut()


async def until_checked(url: str) -> None:
    """Let some checks pass: each is a round trip, and so is what is done here."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        loop = asyncio.get_running_loop()
        end = loop.time() + 1
        while loop.time() < end:
            await channel.declare_queue(QUEUE, passive=True)
