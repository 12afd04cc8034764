"""QU-3 end to end: who starts next when thousands wait, behind the messages that are in the broker already."""

import asyncio
from datetime import timedelta

import pytest

from services.jobs.store.tables import job_history, jobs
from tests.acceptance.engine import Engine
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

DEPTH, SLOTS = 20, 4
ENVIRONMENT = {
    "AIJOBS_QUEUE_DEPTH": str(DEPTH),
    "AIJOBS_SLOTS_INTERACTIVE": str(SLOTS),
    "AIJOBS_USER_LIVE_JOBS": "1000000",
    # This machine runs about fifty of these jobs a second.
    "AIJOBS_RANK_QUANTUM_SECONDS": "0.1",
}
#: What may start before a job that is next in the order: what is in the broker, in the executor's hands, and claimed
#: just now.
AHEAD = DEPTH + SLOTS + DEPTH


@pytest.mark.parametrize("waiting", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.alone], id="long")])
async def test_a_lone_job_and_an_urgent_one_start_behind_what_is_in_the_broker(engine: Engine, waiting: int) -> None:
    """The stated bound, plus the busy user's jobs whose place came while the backlog was created (one a quantum)."""
    async with engine.client() as client:
        gate = asyncio.Semaphore(32)

        async def create(user_id: str, priority: int | None = None) -> str:
            async with gate:
                answer = await client.create("synthetic", user_id=user_id, input={"sleep_ms": 50}, priority=priority)
                return answer.job.job_id

        await engine.executor.kill()
        busy = await asyncio.gather(*(create("busy") for _ in range(waiting)))
        lone, urgent = await create("lone"), await create("busy", priority=0)
    rows = {row["job_id"]: row for row in await engine.read(jobs)}
    passed = sum(rows[job_id]["rank_at"] <= rows[lone]["rank_at"] for job_id in busy)
    await engine.executor.start()

    async def both_started() -> bool:
        started = [(await engine.row(job_id))["started_at"] for job_id in (lone, urgent)]
        return None not in started

    await until(both_started, "both have started", within=timedelta(seconds=60 + passed / 10))
    started = [entry["job_id"] for entry in await engine.read(job_history, kind="locked")]
    moments = {row["job_id"]: row["started_at"] for row in await engine.read(jobs) if row["job_id"] in set(started)}
    order = sorted(moments, key=lambda job_id: moments[job_id])
    assert order.index(urgent) <= AHEAD
    assert order.index(lone) <= AHEAD + passed
    assert len(order) < waiting, "most of the backlog still waits"
    for process in (engine.executor, engine.dispatcher):
        await process.kill()
