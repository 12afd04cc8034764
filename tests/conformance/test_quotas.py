"""Limits per user, exact under concurrency, with nothing to give back (CR-5)."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from aijobs.errors import AijobsError, PlatformUnavailable, QuotaExceeded, TooManyJobs
from services.jobs.creation import Created
from services.jobs.execution import Released
from services.jobs.migrate import upgrade_with
from services.jobs.quotas import Limits
from services.jobs.store.database import Database
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.tables import user_quota_counters
from tests.conformance.conftest import Jobs, failure, lease_of, new_job, success


async def attempt(jobs: Jobs, **changes: object) -> Created | AijobsError:
    (result,) = await jobs.creation.create("backend", [new_job(**changes)])
    return result


async def test_a_user_has_at_most_so_many_live_jobs_however_they_are_created(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=5))
    results = await asyncio.gather(*(attempt(few) for _ in range(20)))
    assert sum(isinstance(result, Created) for result in results) == 5
    refusals = [result for result in results if isinstance(result, TooManyJobs)]
    assert len(refusals) == 15
    assert refusals[0].retry_after is not None
    assert refusals[0].quota_violations[0].subject == "user:user-1"
    assert len(await jobs.rows(jobs_table)) == 5
    assert isinstance(await attempt(few, user_id="user-2"), Created)


async def test_a_batch_is_counted_item_by_item(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=2))
    batch = [
        new_job(),
        new_job(user_id="user-2"),
        new_job(idempotency_key="k"),
        new_job(idempotency_key="k"),
        new_job(),
    ]
    results = await few.creation.create("backend", batch)
    assert [type(result) for result in results] == [Created, Created, Created, Created, TooManyJobs]


@pytest.mark.parametrize("end", ["succeed", "fail", "cancel", "lapse out"])
async def test_every_way_to_end_frees_the_place(jobs: Jobs, end: str) -> None:
    few = Jobs(jobs.database, limits=Limits(live=1), most_takeovers=0, lease_grace=timedelta(seconds=-61))
    job_id = (await few.create()).job.job_id
    if end == "cancel":
        await few.cancel(job_id)
    else:
        lease = lease_of(await few.lock(job_id))
        assert isinstance(await attempt(few), TooManyJobs)
        match end:
            case "succeed":
                await few.submit(lease, success())
            case "fail":
                await few.submit(lease, failure("CREDENTIAL_MISSING"))
            case _:
                await few.lapsing.reap()
    assert isinstance(await attempt(few), Created)


async def test_a_job_that_is_handed_back_still_has_its_place(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=1))
    await few.submit(await few.running(), Released(reason="shutting down"))
    assert isinstance(await attempt(few), TooManyJobs)


async def test_a_repeat_is_never_refused_by_a_limit(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=1, daily=1, monthly=1))
    first = await few.create(request_id="r", idempotency_key="k")
    await few.operating.set_availability("ops", available=False, reason="upgrade")
    for changes in ({"request_id": "r", "idempotency_key": "k"}, {"idempotency_key": "k"}):
        again = await attempt(few, **changes)
        assert isinstance(again, Created)
        assert again.job.job_id == first.job.job_id
    assert isinstance(await attempt(few), PlatformUnavailable)


async def test_a_refused_request_may_be_sent_again_and_then_succeeds(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=1))
    job_id = (await few.create()).job.job_id
    assert isinstance(await attempt(few, request_id="r"), TooManyJobs)
    await few.cancel(job_id)
    assert isinstance(await attempt(few, request_id="r"), Created)


@pytest.mark.parametrize("limits", [Limits(daily=3), Limits(monthly=3)])
async def test_created_jobs_of_a_day_and_of_a_month_are_limited(jobs: Jobs, limits: Limits) -> None:
    few = Jobs(jobs.database, limits=limits)
    results = await asyncio.gather(*(attempt(few) for _ in range(10)))
    refusals = [result for result in results if isinstance(result, QuotaExceeded)]
    assert len(refusals) == 7
    assert refusals[0].retry_after is None
    for row in await jobs.rows(jobs_table):
        await few.cancel(row["job_id"])
    assert isinstance(await attempt(few), QuotaExceeded), "an end gives no quota back"
    assert {row["created"] for row in await jobs.rows(user_quota_counters)} == {3}


async def test_no_quota_no_counter(jobs: Jobs) -> None:
    await jobs.create()
    assert await jobs.rows(user_quota_counters) == []


async def test_a_job_type_can_have_limits_of_its_own(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=3), limits_by_type={"patient": Limits(live=1, daily=2)})
    assert isinstance(await attempt(few, job_type="patient"), Created)
    assert isinstance(refused := await attempt(few, job_type="patient"), TooManyJobs)
    assert "patient" in refused.message
    assert isinstance(await attempt(few), Created)
    assert isinstance(await attempt(few), Created)
    assert isinstance(refused := await attempt(few), TooManyJobs)
    assert "3 jobs" in refused.message
    for row in await jobs.rows(jobs_table):
        await few.cancel(row["job_id"])
    assert isinstance(await attempt(few, job_type="patient"), Created)
    assert isinstance(await attempt(few, job_type="patient"), TooManyJobs)
    assert {(row["job_type"], row["created"]) for row in await jobs.rows(user_quota_counters)} == {("patient", 2)}


async def test_quotas_begin_anew_with_the_utc_day_and_month(tmp_path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    await upgrade_with(url)
    now = [datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)]
    database = Database(url, clock=lambda: now[0])
    jobs = Jobs(database, limits=Limits(daily=1, monthly=2))
    seen = []
    for moment in (
        now[0],
        datetime(2026, 12, 1, tzinfo=UTC),
        datetime(2026, 12, 2, tzinfo=UTC),
        datetime(2026, 12, 3, tzinfo=UTC),
    ):
        now[0] = moment
        seen.append([type(await attempt(jobs)) for _ in range(2)])
    # The second month has room for two, a day for one.
    assert seen == [[Created, QuotaExceeded]] * 3 + [[QuotaExceeded, QuotaExceeded]]
    await database.close()


async def test_the_platform_can_be_switched_off_and_on(jobs: Jobs) -> None:
    assert (await jobs.operating.availability()).available
    running = await jobs.running()
    await jobs.operating.set_availability("ops", available=False, reason="back at noon")
    refused = await attempt(jobs)
    assert isinstance(refused, PlatformUnavailable)
    assert "back at noon" in refused.message
    assert not refused.transient
    assert (await jobs.submit(running, success())).job.lifecycle_status == "succeeded"  # type: ignore[union-attr]
    switch = await jobs.operating.set_availability("ops-2", available=True, reason="")
    assert (switch.available, switch.changed_by) == (True, "ops-2")
    assert isinstance(await attempt(jobs), Created)
