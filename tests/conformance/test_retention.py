"""What is old is deleted, and what is needed stays, however old it is (OB-10, AP-7)."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text

from aijobs.errors import JobNotFound, SnapshotExpired
from aijobs.states import JobState
from services.jobs.execution import Released
from services.jobs.retention import KeptJobs
from services.jobs.store.database import Transaction
from services.jobs.store.tables import (
    job_snapshots,
    metadata,
    model_invocations,
    outbox_events,
)
from services.jobs.store.usage import Call
from tests.acceptance.waiting import until
from tests.conformance.aging import DAY, OF_JOBS, age, counts, ended, events, ids, kill_event, publish, retention, retry
from tests.conformance.conftest import BACKEND, Jobs, failure, hello, lease_of, success

# Events


async def test_published_events_are_deleted_after_a_day(jobs: Jobs) -> None:
    await ended(jobs)
    await age(jobs, DAY - timedelta(minutes=1))
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 published", "completed 1 published"]
    await age(jobs, timedelta(minutes=2))
    await jobs.create()
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 pending"]
    assert len(await ids(jobs)) == 2


async def test_the_latest_event_of_a_job_that_waits_stays_and_the_earlier_ones_go(jobs: Jobs) -> None:
    """Without it the sweep would take the job's message for lost."""
    queued = (await jobs.create()).job.job_id
    lease = await jobs.running()
    await jobs.submit(lease, Released(reason="shutting down"))
    await publish(jobs)
    await age(jobs, 2 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 published", "enqueue 2 published"]
    assert {row["aggregate_id"] for row in await jobs.rows(outbox_events)} == {queued, lease.job_id}
    await jobs.lock(queued)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 2 published"]


async def test_the_sweep_finds_nothing_lost_after_a_pruning(jobs: Jobs) -> None:
    again = Jobs(jobs.database, sweep_patience=timedelta(days=30))
    await again.create()
    await publish(again)
    await age(again, 2 * DAY)
    await retention(again).prune()
    await again.sessions.open(hello("idle", free_slots=1, idle=timedelta(days=31)))
    assert await again.reconciliation.sweep() == 0
    assert await events(again) == ["enqueue 1 published"]


async def test_dead_events_are_deleted_after_a_week_unless_their_job_waits(jobs: Jobs) -> None:
    waits = (await jobs.create()).job.job_id
    await kill_event(jobs)
    over = (await jobs.create()).job.job_id
    await kill_event(jobs)
    await jobs.cancel(over)
    await publish(jobs)
    await age(jobs, 6 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 dead", "enqueue 1 dead"]
    await age(jobs, 2 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 dead"]
    assert [row["aggregate_id"] for row in await jobs.rows(outbox_events)] == [waits]


async def test_dead_events_of_earlier_dispatches_stay_too_while_the_job_waits(jobs: Jobs) -> None:
    """A dead event may have been sent all the same: its job was run and given back."""
    job_id = (await jobs.create()).job.job_id
    await kill_event(jobs)
    await jobs.submit(lease_of(await jobs.lock(job_id)), Released(reason="x"))
    await publish(jobs)
    await age(jobs, 8 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 dead", "enqueue 2 published"]


async def test_discarded_events_are_deleted_after_a_week(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await publish(jobs)
    await jobs.cancel(job_id)

    async def discard(tx: Transaction) -> None:
        await tx.execute(text("UPDATE outbox_events SET status = 'discarded' WHERE event_type = 'ai.job.enqueue'"))

    await jobs.database.write(discard)
    await age(jobs, 6 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["enqueue 1 discarded", "cancelled 1 pending"]
    await age(jobs, 2 * DAY)
    await retention(jobs).prune()
    assert await events(jobs) == ["cancelled 1 pending"], "what is still to be published never gets old"


# Jobs


async def test_an_ended_job_goes_after_30_days_with_all_that_belongs_to_it(jobs: Jobs) -> None:
    for state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
        await ended(jobs, state)
    lease = await jobs.running()
    await record_call(jobs, lease.job_id)
    await jobs.submit(lease, success())
    await publish(jobs)
    await age(jobs, 30 * DAY - timedelta(minutes=1))
    await retention(jobs, published_events=31 * DAY, dead_events=31 * DAY).prune()
    before = await counts(jobs)
    assert before["jobs"] == before["job_snapshots"] == 4
    assert all(before.values())
    await age(jobs, timedelta(minutes=2))
    alive = {(await jobs.create()).job.job_id, (await jobs.running()).job_id}
    await retention(jobs, published_events=31 * DAY, dead_events=31 * DAY).prune()
    assert await ids(jobs) == alive
    assert await counts(jobs) == {
        "jobs": 2,
        "job_snapshots": 2,
        "job_artifacts": 0,
        "job_history": 3,
        "requests": 2,
        "outbox_events": 2,
    }
    assert [row["job_id"] for row in await jobs.rows(model_invocations)] == [lease.job_id], "accounts are kept"


async def record_call(jobs: Jobs, job_id: str) -> None:
    call = Call(
        job_id=job_id,
        attempt=1,
        call_no=1,
        provider="offline",
        model="m",
        tier="primary",
        prompt_key="p",
        prompt_version="1",
        credential_mode="platform_key",
        settled=None,
    )
    await jobs.ledger.record([call])


def test_every_table_that_knows_jobs_is_thought_of() -> None:
    known = {table.name for table in metadata.tables.values() if {"job_id", "aggregate_id"} & set(table.c.keys())}
    assert known == {table.name for table in OF_JOBS} | {"model_invocations"}


async def test_live_jobs_never_go_however_old_they_are(jobs: Jobs) -> None:
    queued, running = (await jobs.create()).job.job_id, await jobs.running()
    lapsed = await jobs.running()
    await jobs.submit(lapsed, Released(reason="x"))
    await publish(jobs)
    await age(jobs, 3650 * DAY)
    await retention(jobs).prune()
    assert await ids(jobs) == {queued, running.job_id, lapsed.job_id}
    assert len(await jobs.rows(job_snapshots)) == 3
    await jobs.submit(running, success())
    await jobs.submit(lease_of(await jobs.lock(queued)), success())


async def test_a_job_stays_while_a_retry_of_it_is_alive(jobs: Jobs) -> None:
    old = await ended(jobs, JobState.FAILED)
    new = await retry(jobs, old)
    await publish(jobs)
    await age(jobs, 31 * DAY)
    await retention(jobs).prune()
    assert await ids(jobs) == {old, new.job_id}
    await jobs.submit(lease_of(await jobs.lock(new.job_id)), success())
    await publish(jobs)
    await retention(jobs).prune()
    assert await ids(jobs) == {new.job_id}


async def test_a_job_stays_until_its_end_is_published(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, success())
    await age(jobs, 31 * DAY)
    await retention(jobs).prune()
    assert await ids(jobs) == {lease.job_id}
    await publish(jobs)
    await retention(jobs).prune()
    assert await counts(jobs) == dict.fromkeys(await counts(jobs), 0)


async def test_an_event_that_made_nobody_run_it_keeps_no_ended_job(jobs: Jobs) -> None:
    """Its queue is paused, say: the enqueue event is still there when the job was cancelled long ago."""
    await jobs.operating.pause("ops", "ai-interactive", "")
    job_id = (await jobs.create()).job.job_id
    await jobs.cancel(job_id)
    await publish(jobs)
    await age(jobs, 31 * DAY)
    await retention(jobs).prune()
    assert await ids(jobs) == set()
    assert await events(jobs) == []


async def test_ages_can_be_set_by_type_and_state(jobs: Jobs) -> None:
    ages = {"testing": KeptJobs(succeeded=DAY, failed=60 * DAY), "patient": KeptJobs(cancelled=DAY)}
    kept = {
        await ended(jobs, JobState.FAILED),
        await ended(jobs, job_type="patient"),
    }
    gone = {await ended(jobs), await ended(jobs, JobState.CANCELLED, job_type="patient")}
    late = await ended(jobs, JobState.CANCELLED)
    await age(jobs, 2 * DAY)
    await retention(jobs, jobs_by_type=ages).prune()
    assert await ids(jobs) == kept | {late}
    assert not gone & await ids(jobs)
    await age(jobs, 30 * DAY)
    await retention(jobs, jobs_by_type=ages).prune()
    assert len(await ids(jobs)) == 1, "failed ones of this type are kept for 60 days"


async def test_many_jobs_go_in_one_pass_also_behind_some_that_stay(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.retention.JOB_CHUNK", 3)
    monkeypatch.setattr("services.jobs.retention.CHUNK", 3)
    old = [await ended(jobs, JobState.FAILED, user_id=f"user-{number % 3}") for number in range(10)]
    for job_id in old[:4]:
        await retry(jobs, job_id)
    waiting = [(await jobs.create()).job.job_id for _ in range(4)]
    await publish(jobs)
    await age(jobs, 31 * DAY)
    late = await ended(jobs)
    await retention(jobs).prune()
    stayed = await ids(jobs)
    assert stayed >= {*old[:4], *waiting, late}
    assert not stayed & set(old[4:])
    assert len(await jobs.rows(job_snapshots)) == 9, "of the ended ones that stay the snapshots have expired"
    assert len(await events(jobs)) == 8 + 2


# Snapshots


async def test_a_snapshot_may_expire_earlier_and_then_its_job_cannot_be_retried(jobs: Jobs) -> None:
    job_id = await ended(jobs, JobState.FAILED)
    alive = (await jobs.create()).job.job_id
    await age(jobs, 8 * DAY)
    await retention(jobs, snapshots=9 * DAY).prune()
    assert len(await jobs.rows(job_snapshots)) == 2
    await retention(jobs, snapshots=7 * DAY).prune()
    assert [row["job_id"] for row in await jobs.rows(job_snapshots)] == [alive]
    assert await ids(jobs) == {job_id, alive}
    with pytest.raises(SnapshotExpired):
        await retry(jobs, job_id)


async def test_a_long_run_does_not_shorten_the_time_of_its_snapshot(jobs: Jobs) -> None:
    lease = await jobs.running()
    await age(jobs, 40 * DAY)
    await jobs.submit(lease, failure("CREDENTIAL_MISSING"))
    await publish(jobs)
    await retention(jobs).prune()
    assert len(await jobs.rows(job_snapshots)) == 1
    await retry(jobs, lease.job_id)


# Memory of what is gone


async def test_a_request_id_and_a_key_whose_job_is_gone_work_as_new(jobs: Jobs) -> None:
    asked = {"request_id": "r1", "idempotency_key": "k1"}
    first = await ended(jobs, JobState.FAILED, **asked)
    assert (await jobs.create(**asked)).job.job_id == first
    retried = await retry(jobs, first, "r2")
    await jobs.submit(lease_of(await jobs.lock(retried.job_id)), success())
    await publish(jobs)
    await age(jobs, 31 * DAY)
    await retention(jobs).prune()
    again = await jobs.create(**asked, input={"text": "another"})
    assert again.job.job_id != first
    assert not again.deduplicated
    with pytest.raises(JobNotFound):
        await retry(jobs, first, "r2")
    for call in (jobs.cancel(first), jobs.queries.get(BACKEND, first, full=True)):
        with pytest.raises(JobNotFound):
            await call


async def test_the_loop_deletes_by_itself(jobs: Jobs) -> None:
    await ended(jobs)
    await age(jobs, 31 * DAY)

    async def gone() -> bool:
        return not await ids(jobs)

    running = asyncio.create_task(retention(jobs).run())
    try:
        await until(gone, "the jobs deleted")
    finally:
        running.cancel()
    assert await counts(jobs) == dict.fromkeys(await counts(jobs), 0)
