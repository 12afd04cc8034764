"""Creates a second, and jobs a second from create to succeeded, with jobs that do nothing."""

import asyncio
from datetime import timedelta

import pytest

from services.jobs.store.tables import jobs
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.waiting import until
from tests.benchmarks.conftest import Report, percentile

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

JOBS, AT_A_TIME, SLOTS = 1_000, 32, 32


async def test_jobs_that_do_nothing(make_engine: MakeEngine, report: Report) -> None:
    engine = await make_engine(AIJOBS_SLOTS_INTERACTIVE=str(SLOTS), AIJOBS_USER_LIVE_JOBS="100000")
    await engine.start()
    places, loop = asyncio.Semaphore(AT_A_TIME), asyncio.get_running_loop()
    taken: list[float] = []
    async with engine.client() as client:

        async def create(number: int) -> None:
            async with places:
                began = loop.time()
                await client.create("synthetic", user_id=f"user-{number % 50}", input={})
                taken.append(1000 * (loop.time() - began))

        began = loop.time()
        await asyncio.gather(*map(create, range(JOBS)))
        created = loop.time()

    async def all_ended() -> bool:
        return await engine.count_where(jobs, lifecycle_status="succeeded") == JOBS

    await until(all_ended, "every job has ended", within=timedelta(seconds=300))
    under = {"jobs": JOBS, "at_a_time": AT_A_TIME, "slots": SLOTS}
    report("creates", JOBS / (created - began), "1/s", **under)
    report("create_p50", percentile(taken, 0.5), "ms", **under)
    report("create_p99", percentile(taken, 0.99), "ms", **under)
    report("jobs", JOBS / (loop.time() - began), "1/s", **under)
