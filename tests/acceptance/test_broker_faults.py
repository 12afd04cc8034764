"""What goes wrong with the broker under whole services: an alarm, a queue that is gone, messages of strangers."""

import asyncio
import json
import urllib.request

import aio_pika
import pytest
import pytest_asyncio

from aijobs.broker.topology import DEAD_LETTER_QUEUE
from aijobs.v1 import job_pb2
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.provision import BrokerServer
from services.jobs.store.tables import job_artifacts, outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.waiting import until
from tests.alarm import memory_alarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUEUE = "ai-interactive"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, own_rabbitmq: BrokerServer) -> Engine:
    engine = await make_engine(broker_url=own_rabbitmq.address.url())
    await engine.start()
    return engine


async def attempts(engine: Engine) -> set[int]:
    """Return how many attempts events have used up."""
    return {event["attempt_count"] for event in await engine.read(outbox_events)}


async def test_an_alarm_of_the_broker_costs_no_event_an_attempt(engine, own_rabbitmq):
    """OB-4: a blocked connection is nobody's fault; everything flows by itself afterwards."""
    async with memory_alarm(own_rabbitmq):
        job_ids = [await engine.create() for _ in range(10)]
        await engine.until_logged(engine.dispatcher, "the broker takes no messages")

        async def not_ready() -> bool:
            return bool(await engine.dispatcher.health() == "NOT_SERVING")

        await until(not_ready, "the dispatcher not to be ready")
        assert [row["event_type"] for row in await engine.read(outbox_events, status="published")] == []
    for job_id in job_ids:
        assert (await engine.ended(job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
        assert await engine.kinds(job_id) == ["created", "locked", "succeeded"]
        assert len(await engine.read(job_artifacts, job_id=job_id)) == 1

        async def settled(job_id: str = job_id) -> bool:
            # The broker may have had a message without saying so in time: its job has run, and it is not sent again.
            return (await engine.event_statuses(job_id))["ai.job.enqueue"] in {"published", "discarded"}

        await until(settled, "the event to be settled")
    assert await attempts(engine) == {0}
    assert len(lines_with(engine.dispatcher.log, '"event": "the broker takes no messages')) == 1
    assert len(lines_with(engine.dispatcher.log, '"event": "the broker takes messages again')) == 1


async def test_a_work_queue_that_is_deleted_costs_no_event_and_no_message(engine, own_rabbitmq):
    """Case B6: the exchange stays, so a message for the queue has nowhere to go; it is told, and the queue declared."""
    await engine.executor.kill()
    await own_rabbitmq.control("delete_queue", QUEUE)
    job_ids = [await engine.create() for _ in range(20)]
    for job_id in job_ids:
        await engine.until_event(job_id, "published")
    # What is marked published is there: nothing was counted as sent that had nowhere to go.
    assert (await own_rabbitmq.address.depth(QUEUE)).ready == 20
    assert await attempts(engine) == {0}
    await engine.executor.start()
    for job_id in job_ids:
        await engine.require_run_once(job_id)


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


async def test_messages_that_nobody_can_read_are_put_aside_once_counted_and_not_repeated_in_the_log(
    engine, own_rabbitmq
):
    """Case B9: no JSON, empty, 10 MB, another schema; a good one behind them runs."""
    secret = "the learner wrote this"
    bad = [
        b"",
        f"no JSON: {secret}".encode(),
        json.dumps({"jobId": secret}).encode(),
        json.dumps([secret]).encode(),
        b"x" * (10 * 1024 * 1024),
    ]
    await engine.executor.kill()
    port = free_port()
    executor = await engine.add("executor", AIJOBS_METRICS_LISTEN=f"{LOOPBACK}:{port}")
    async with await aio_pika.connect(own_rabbitmq.address.url()) as stranger:
        channel = await stranger.channel()
        dead = await channel.get_queue(DEAD_LETTER_QUEUE)
        await dead.purge()
        for number, body in enumerate(bad):
            await channel.default_exchange.publish(aio_pika.Message(body, message_id=str(number)), QUEUE)
        await engine.require_run_once(await engine.create())
        letters = {}
        async with asyncio.timeout(20), dead.iterator() as arriving:
            async for letter in arriving:
                letters[letter.message_id] = letter.body
                await letter.ack()
                if len(letters) == len(bad):
                    break
        assert [letters[str(number)] for number in range(len(bad))] == bad
        assert await dead.get(fail=False) is None
    page = await asyncio.to_thread(scraped, port)
    for reason, count in {"no_json": 2, "other_schema": 2, "too_large": 1}.items():
        assert f'aijobs_poison_messages_total{{queue="{QUEUE}",reason="{reason}"}} {count}.0' in page
    assert len(lines_with(executor.log, "poison message")) == len(bad)
    assert lines_with(executor.log, secret) == []
