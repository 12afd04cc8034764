"""The example in examples/subscriber, run as the process of another team beside a whole engine (OB-8)."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import aio_pika
import pytest
import pytest_asyncio
from aio_pika.abc import AbstractChannel

from aijobs.completion import EXCHANGE
from tests.acceptance.command import Running
from tests.acceptance.engine import Engine
from tests.acceptance.gate import Gate, Link
from tests.acceptance.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "subscriber" / "subscriber.py"
QUEUE, DEAD_QUEUE = "example.job-ends", "example.job-ends.dead"
SUBSCRIBED = "subscribed to aijobs.events"

Subscribe = Callable[..., Awaitable[Running]]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "subscriber.db"


@pytest_asyncio.fixture(loop_scope="module")
async def channel(engine: Engine) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(engine.connections.broker_url)
    async with connection:
        channel = await connection.channel()
        yield channel
        for name in (QUEUE, DEAD_QUEUE):
            await channel.queue_delete(name)


@pytest_asyncio.fixture(loop_scope="module")
async def subscribe(engine: Engine, channel: AbstractChannel, database: Path) -> AsyncIterator[Subscribe]:
    """Start the example and wait until it receives; takes the broker's URL."""
    started = []

    async def start(broker_url: str = engine.connections.broker_url) -> Running:
        environment = {"SUBSCRIBER_BROKER_URL": broker_url, "SUBSCRIBER_DATABASE": str(database)}
        started.append(running := await Running.start(str(EXAMPLE), environment=environment))
        await running.until(SUBSCRIBED)
        return running

    yield start
    for running in started:
        await running.end()


def rows(database: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()


async def stop(subscriber: Running) -> str:
    """End it as an operator does, and return all that it said."""
    subscriber.process.terminate()
    ended = await subscriber.ended()
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.endswith("stopped\n")
    return ended.out


async def test_every_end_is_handled_once_and_acknowledged(engine, channel, subscribe, database) -> None:
    subscriber = await subscribe()
    succeeded = await engine.create()
    await subscriber.until(f"job {succeeded} succeeded\n")
    failed = await engine.create(fail_times=1, fail_code="CREDENTIAL_REJECTED")
    await subscriber.until(f"job {failed} failed: its user needs a new key (CREDENTIAL_REJECTED)\n")
    cancelled = await engine.create(sleep_ms=60_000)
    await engine.changes(cancelled, upto="locked")
    async with engine.client() as client:
        await client.cancel(cancelled)
    await subscriber.until(f"job {cancelled} cancelled\n")
    said = await stop(subscriber)
    assert said.count("job ") == 3
    ends = {(succeeded, "succeeded", 3), (failed, "failed", 3), (cancelled, "cancelled", 4)}
    assert set(rows(database, "SELECT job_id, state, sequence FROM ends")) == ends
    assert await waiting(channel) == 0, "all were acknowledged"


async def waiting(channel: AbstractChannel) -> int:
    """Count what is in the queue, which is there without a consumer and is a durable quorum queue."""
    queue = await channel.declare_queue(QUEUE, durable=True, passive=True)
    assert queue.declaration_result.consumer_count == 0
    return queue.declaration_result.message_count or 0


class Held(Link):
    """A connection whose client is heard until `shut`; what it sends later never arrives."""

    def __init__(self, shut: asyncio.Event) -> None:
        self._shut = shut

    async def sent(self, data: bytes) -> bool:
        if self._shut.is_set():
            await asyncio.Event().wait()
        return True


async def test_what_was_handled_but_not_acknowledged_comes_again_and_is_not_handled_again(
    engine, channel, subscribe, database
) -> None:
    """Killed between its commit and its acknowledgement: the broker delivers the message to the next one."""
    deaf = asyncio.Event()
    gate = Gate(engine.connections.broker_url, link=lambda: Held(deaf))
    await gate.open()
    try:
        first = await subscribe(gate.url)
        deaf.set()
        job_id = await engine.create()
        await first.until(f"job {job_id} succeeded\n")
        ((event_id,),) = rows(database, "SELECT event_id FROM handled")
        await first.end()
    finally:
        await gate.shut()
    second = await subscribe()
    await second.until(f"again: event {event_id}\n")
    assert "succeeded" not in await stop(second)
    assert rows(database, "SELECT job_id, state FROM ends") == [(job_id, "succeeded")]
    assert await waiting(channel) == 0


async def test_a_message_that_was_published_twice_is_handled_once(engine, channel, subscribe, database) -> None:
    copies = await channel.declare_queue("copies-of-the-test", exclusive=True)
    await copies.bind(EXCHANGE, routing_key="ai.job.*")
    subscriber = await subscribe()
    job_id = await engine.create()
    await subscriber.until(f"job {job_id} succeeded\n")
    await until(lambda: one_is_in(copies), "a copy")
    message = await copies.get(no_ack=True)
    again = aio_pika.Message(message.body, message_id=message.message_id)
    await (await channel.get_exchange(EXCHANGE)).publish(again, routing_key=message.routing_key or "")
    await subscriber.until(f"again: event {message.message_id}\n")
    assert (await stop(subscriber)).count("succeeded") == 1


async def one_is_in(queue: aio_pika.abc.AbstractQueue) -> bool:
    return bool((await queue.declare()).message_count)


async def test_what_cannot_be_read_is_put_aside_and_new_kinds_are_passed_over(engine, channel, subscribe) -> None:
    subscriber = await subscribe()
    exchange = await channel.get_exchange(EXCHANGE)
    await exchange.publish(aio_pika.Message(b'{"eventId": 7}', message_id="poison"), routing_key="ai.job.failed")
    await exchange.publish(aio_pika.Message(b"{}", message_id="new"), routing_key="ai.job.restarted")
    await subscriber.until(f"unreadable: message poison, now in {DEAD_QUEUE}\n")
    job_id = await engine.create()
    await subscriber.until(f"job {job_id} succeeded\n")
    dead = await channel.get_queue(DEAD_QUEUE)
    await until(lambda: one_is_in(dead), "the dead letter")
    message = await dead.get(no_ack=True)
    assert (message.message_id, message.body) == ("poison", b'{"eventId": 7}')
    await stop(subscriber)
    assert await waiting(channel) == 0


async def test_a_broker_that_was_away_costs_no_end(engine, channel, subscribe) -> None:
    gate = Gate(engine.connections.broker_url)
    await gate.open()
    try:
        subscriber = await subscribe(gate.url)
        await gate.shut()
        await subscriber.until("trying again\n")
        job_id = await engine.create()
        await engine.until_event(job_id, "published", "ai.job.completed")
        assert job_id not in subscriber.said
        await gate.open()
        await subscriber.until(f"job {job_id} succeeded\n")
        # A queue that somebody deletes is declared again.
        subscriber.said = ""
        await channel.queue_delete(QUEUE)
        await subscriber.until(SUBSCRIBED)
        after = await engine.create()
        await subscriber.until(f"job {after} succeeded\n")
        await stop(subscriber)
    finally:
        await gate.shut()
