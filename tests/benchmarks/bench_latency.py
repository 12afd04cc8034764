"""From the create to the message in RabbitMQ, at a steady twenty jobs a second (OB-6)."""

import asyncio
import json
from datetime import UTC, datetime

import aio_pika
import pytest

from tests.acceptance.conftest import MakeEngine
from tests.benchmarks.conftest import Report, percentile

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

RATE, SECONDS = 20, 20
#: The fallback poll of a waiting claim looks after 0.8 s at the earliest: what is slower may be owed to it.
FALLBACK_MS = 800


async def test_create_to_message(make_engine: MakeEngine, report: Report) -> None:
    engine = await make_engine(AIJOBS_QUEUE_DEPTH="100000", AIJOBS_USER_LIVE_JOBS="100000")
    await engine.start()
    await engine.executor.kill()
    answered: dict[str, datetime] = {}
    arrived: dict[str, tuple[datetime, datetime]] = {}
    connection = await aio_pika.connect(engine.connections.broker_url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=1000)
    queue = await channel.get_queue("ai-interactive", ensure=False)

    async def received(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        body = json.loads(message.body)
        arrived[body["jobId"]] = datetime.now(UTC), datetime.fromisoformat(body["createdAt"])
        await message.ack()

    await queue.consume(received)
    async with engine.client() as client:

        async def create(number: int) -> None:
            answer = await client.create("synthetic", user_id=f"user-{number % 50}", input={})
            answered[answer.job.job_id] = datetime.now(UTC)

        loop = asyncio.get_running_loop()
        began = loop.time()
        creating = []
        for number in range(RATE * SECONDS):
            creating.append(asyncio.create_task(create(number)))
            await asyncio.sleep(max(0.0, began + (number + 1) / RATE - loop.time()))
        await asyncio.gather(*creating)
    async with asyncio.timeout(10):
        while len(arrived) < len(answered):  # noqa: ASYNC110 - messages come one by one
            await asyncio.sleep(0.01)
    await connection.close()
    # The event's time is that of its INSERT, before the commit, and the answer comes after it: the truth is between.
    since_insert = [1000 * (at - written).total_seconds() for at, written in arrived.values()]
    since_answer = [1000 * (arrived[job_id][0] - at).total_seconds() for job_id, at in answered.items()]
    for name, values in (("insert_to_message", since_insert), ("answer_to_message", since_answer)):
        for share in (0.5, 0.99):
            report(f"{name}_p{round(share * 100)}", percentile(values, share), "ms", jobs_per_second=RATE)
    report("insert_to_message_max", max(since_insert), "ms", jobs_per_second=RATE)
    assert percentile(since_insert, 0.99) < FALLBACK_MS, "the commit wakes the claim, not the poll"
