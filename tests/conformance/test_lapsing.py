"""How leases end without an outcome, and what follows (LC-7)."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from aijobs.errors import CancelRequested, IllegalTransition, JobNotReady, LeaseConflict, LeaseLost, Unavailable
from aijobs.states import JobState
from services.jobs.execution import Accepted, Cancelled, Released
from services.jobs.leasing import Extended, Locked
from services.jobs.lifecycle import Lease
from services.jobs.store import executors
from services.jobs.store import jobs as job_store
from services.jobs.store.tables import executors as executors_table
from services.jobs.store.tables import job_artifacts, outbox_events
from services.jobs.store.tables import jobs as jobs_table
from tests.conformance.conftest import BACKEND, Jobs, failure, lease_of, success

#: Leases of 60 seconds ended a second ago, as far as these use cases can tell.
ENDED = timedelta(seconds=-61)


@pytest.fixture
def late(jobs: Jobs) -> Jobs:
    """The same jobs, for a reaper to whom every lease has ended longer ago than its grace."""
    return Jobs(jobs.database, lease_grace=ENDED, opened=jobs.opened)


async def dispatches(jobs: Jobs, job_id: str) -> list[str]:
    """Return the dispatch numbers of a job's enqueue events."""
    events = await jobs.rows(outbox_events, "id")
    return [
        e["dedupe_key"].rpartition(":")[2] for e in events if e["dedupe_key"].startswith(f"ai.job.enqueue:{job_id}")
    ]


async def test_a_lease_that_has_not_ended_long_enough_ago_is_left_alone(jobs: Jobs) -> None:
    lease = await jobs.running()
    assert await jobs.lapsing.reap() == 0
    assert isinstance(await jobs.submit(lease, success()), Accepted)


async def test_an_expired_lease_lapses_once_and_the_run_waits_for_a_takeover(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    assert [await late.lapsing.reap() for _ in range(3)] == [1, 0, 0]
    job = (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job
    assert (job.lifecycle_status, job.lease_token, job.locked_by, job.takeover_count) == ("running", None, None, 1)
    assert job.lapsed_at is not None
    assert await jobs.history(lease.job_id) == ["created", "locked", "lapsed"]
    assert await dispatches(jobs, lease.job_id) == ["1", "2"]
    for report in (success(), failure("PROVIDER_TIMEOUT"), Cancelled(), Released(reason="x")):
        assert isinstance(await jobs.submit(lease, report), LeaseLost)
    assert isinstance(await jobs.extend(lease, 50), LeaseLost)

    taken_over = lease_of(await jobs.lock(lease.job_id, executor_id="executor-2"))
    assert taken_over.attempt == lease.attempt + 1
    assert isinstance(await jobs.try_lock(lease.job_id), LeaseConflict)
    assert isinstance(await jobs.submit(lease, success()), LeaseLost)
    assert isinstance(await jobs.submit(taken_over, success()), Accepted)
    assert await jobs.history(lease.job_id) == ["created", "locked", "lapsed", "taken_over", "succeeded"]


async def test_a_heartbeat_after_the_end_of_the_lease_still_renews_it(jobs: Jobs) -> None:
    lease = await jobs.running()
    short = Jobs(jobs.database, lease_time=timedelta(microseconds=1), opened=jobs.opened)
    await short.extend(lease)
    assert isinstance(await jobs.extend(lease), Extended)
    assert await Jobs(jobs.database, lease_grace=timedelta(seconds=-50)).lapsing.reap() == 0


@pytest.mark.parametrize("most", [0, 2])
async def test_a_run_whose_takeovers_are_used_up_fails(jobs: Jobs, most: int) -> None:
    late = Jobs(jobs.database, lease_grace=ENDED, most_takeovers=most, opened=jobs.opened)
    job_id = (await jobs.create()).job.job_id
    for _ in range(most + 1):
        await jobs.lock(job_id)
        assert await late.lapsing.reap() == 1
    job = (await jobs.queries.get(BACKEND, job_id, full=False)).job
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_LEASE_EXPIRED")
    assert (job.takeover_count, job.retry_count) == (most, 0)
    assert job.error_public
    (event,) = [row for row in await jobs.rows(outbox_events) if row["event_type"] == "ai.job.failed"]
    assert "INTERNAL_LEASE_EXPIRED" in event["payload_json"]


async def test_a_lapsing_run_whose_cancel_was_requested_is_cancelled(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    await jobs.cancel(lease.job_id)
    assert await late.lapsing.reap() == 1
    assert await jobs.history(lease.job_id) == ["created", "locked", "cancel_requested", "cancelled"]


async def test_a_lapsed_run_is_cancelled_at_once(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    await late.lapsing.reap()
    answer = await jobs.cancel(lease.job_id)
    assert (answer.outcome, answer.job.lifecycle_status) == ("cancelled", "cancelled")
    assert isinstance(await jobs.try_lock(lease.job_id), IllegalTransition)


async def test_a_run_that_is_handed_back_costs_nothing_and_is_dispatched_at_once(jobs: Jobs) -> None:
    none_left = Jobs(jobs.database, most_takeovers=0, opened=jobs.opened)
    lease = await none_left.running()
    first = await none_left.submit(lease, Released(reason="shutting down"))
    again = await none_left.submit(lease, Released(reason="shutting down"))
    assert isinstance(first, Accepted)
    assert first == Accepted(job=first.job)
    assert isinstance(again, Accepted)
    assert (first.job.retry_count, first.job.takeover_count, first.job.lifecycle_status) == (0, 0, "running")
    assert await dispatches(jobs, lease.job_id) == ["1", "2"]
    (_, event) = await jobs.claim()
    assert event.aggregate_id == lease.job_id
    assert isinstance(await jobs.submit(lease, success()), LeaseLost)
    assert (await jobs.lock(lease.job_id)).job.attempt == 2
    assert await jobs.history(lease.job_id) == ["created", "locked", "handed_back", "taken_over"]


async def test_a_run_can_be_handed_back_for_later(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.claim()
    await jobs.submit(lease, Released(reason="retry later", delay=timedelta(hours=1)))
    assert await jobs.claim() == []
    assert isinstance(await jobs.try_lock(lease.job_id), JobNotReady)


async def test_handing_back_a_run_whose_cancel_was_requested_cancels_it(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.cancel(lease.job_id)
    accepted = await jobs.submit(lease, Released(reason="shutting down"))
    assert isinstance(accepted, Accepted)
    assert accepted.job.lifecycle_status == JobState.CANCELLED
    assert isinstance(await jobs.submit(lease, success()), CancelRequested | LeaseLost)


async def test_a_report_that_comes_between_the_reapers_look_and_its_write_stands(jobs: Jobs, late: Jobs) -> None:
    """Case L1: the reaper was frozen there."""
    lease = await jobs.running()
    ids = await jobs.database.read(lambda tx: job_store.expired_leases(tx, grace=ENDED, limit=10))
    assert ids == [lease.job_id]
    await jobs.submit(lease, success())
    assert await jobs.database.write(lambda tx: late.lapsing._lapse_if_expired(tx, ids, grace=ENDED)) == [False]
    assert await jobs.history(lease.job_id) == ["created", "locked", "succeeded"]


async def test_a_heartbeat_that_comes_between_the_reapers_look_and_its_write_saves_the_run(jobs: Jobs) -> None:
    lease = await jobs.running()
    grace = timedelta(seconds=-30)
    await Jobs(jobs.database, lease_time=timedelta(seconds=1), opened=jobs.opened).extend(lease)
    ids = await jobs.database.read(lambda tx: job_store.expired_leases(tx, grace=grace, limit=10))
    assert ids == [lease.job_id]
    await jobs.extend(lease)
    reaper = Jobs(jobs.database, lease_grace=grace).lapsing
    assert await jobs.database.write(lambda tx: reaper._lapse_if_expired(tx, ids, grace=grace)) == [False]
    assert isinstance(await jobs.submit(lease, success()), Accepted)


async def test_many_reapers_and_reports_at_once_end_each_run_once(jobs: Jobs) -> None:
    reapers = [Jobs(jobs.database, lease_grace=ENDED, most_takeovers=0) for _ in range(3)]
    leases = [await jobs.running() for _ in range(20)]
    reports = [jobs.submit(lease, success()) for lease in leases]
    results = await asyncio.gather(*(reaper.lapsing.reap() for reaper in reapers), *reports)
    accepted = [lease for lease, result in zip(leases, results[3:], strict=True) if isinstance(result, Accepted)]
    lapsed = sum(result for result in results[:3] if isinstance(result, int))
    assert lapsed + len(accepted) == len(leases)
    for lease in leases:
        end = "succeeded" if lease in accepted else "failed"
        assert await jobs.history(lease.job_id) == ["created", "locked", end]


async def test_of_many_executors_exactly_one_takes_a_lapsed_run_over(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    await late.lapsing.reap()
    await asyncio.gather(*(jobs.holder(f"executor-{number}") for number in range(20)))
    results = await asyncio.gather(
        *(jobs.try_lock(lease.job_id, executor_id=f"executor-{number}") for number in range(20))
    )
    assert sum(isinstance(result, Locked) for result in results) == 1


async def test_only_a_present_lease_is_in_the_way_of_a_takeover(jobs: Jobs) -> None:
    """The end of its time alone ends no lease: its holder may still renew it."""
    lease = await jobs.running()
    await Jobs(jobs.database, lease_time=timedelta(seconds=-100), opened=jobs.opened).extend(lease)
    assert isinstance(await jobs.try_lock(lease.job_id), LeaseConflict)


async def test_starting_anew_lapses_every_lease(jobs: Jobs) -> None:
    leases = [await jobs.running() for _ in range(3)]
    assert await jobs.lapsing.lapse_every_lease() == 3
    assert await jobs.operating.executors() == []
    assert [isinstance(await jobs.submit(lease, success()), LeaseLost) for lease in leases] == [True] * 3


async def test_more_leases_than_one_transaction_takes_all_lapse(jobs: Jobs, late: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.lapsing.CHUNK", 2)
    leases = [await jobs.running() for _ in range(5)]
    assert await late.lapsing.reap() == 5
    assert [len(await dispatches(jobs, lease.job_id)) for lease in leases] == [2] * 5


async def test_a_lease_that_cannot_be_written_is_in_nobodys_way(jobs: Jobs, late: Jobs) -> None:
    """A poison row, here one whose next dispatch is taken: the reaper goes on, and so do the other leases."""
    poison, good = await jobs.running(), await jobs.running()

    async def take_dispatch(tx) -> None:
        statement = update(outbox_events).where(outbox_events.c.aggregate_id == poison.job_id)
        await tx.execute(statement.values(dedupe_key=f"ai.job.enqueue:{poison.job_id}:2"))

    await jobs.database.write(take_dispatch)
    assert await late.lapsing.reap() == 1
    assert await jobs.history(good.job_id) == ["created", "locked", "lapsed"]
    assert await jobs.history(poison.job_id) == ["created", "locked"]


async def test_the_reaper_forgets_executors_that_are_long_gone(jobs: Jobs) -> None:
    await jobs.holder("executor-1")
    await jobs.holder("executor-2")

    async def age(tx) -> None:
        past = "seen_at - 172900000000" if tx.sqlite else "seen_at - INTERVAL 49 HOUR"
        await tx.execute(text(f"UPDATE executors SET seen_at = {past} WHERE executor_id = 'executor-1'"))

    await jobs.database.write(age)
    unseen = timedelta(days=2)
    assert await jobs.database.write(lambda tx: executors.forget(tx, unseen=unseen, limit=10)) == 1
    assert await jobs.database.write(lambda tx: executors.forget(tx, unseen=unseen, limit=10)) == 0
    assert [row["executor_id"] for row in await jobs.rows(executors_table)] == ["executor-2"]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("queued", "pending"),
        ("running", "processing"),
        ("succeeded", "completed"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
    ],
)
async def test_the_database_derives_the_word_that_old_clients_read(jobs: Jobs, state: str, word: str) -> None:
    """LC-12: it cannot drift, because nobody can write it."""
    job_id = (await jobs.create()).job.job_id
    if state == "cancelled":
        await jobs.cancel(job_id)
    elif state != "queued":
        lease = lease_of(await jobs.lock(job_id))
        if state != "running":
            await jobs.submit(lease, success() if state == "succeeded" else failure("CREDENTIAL_MISSING"))
    (row,) = await jobs.rows(jobs_table)
    assert (row["lifecycle_status"], row["legacy_status"]) == (state, word)
    with pytest.raises((DBAPIError, Unavailable)):
        await jobs.database.write(lambda tx: tx.execute(update(jobs_table).values(legacy_status="x")))


async def test_a_takeover_keeps_the_history_of_failed_executions(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, failure("PROVIDER_TIMEOUT", 1, feedback="too slow"))
    await late.lapsing.reap()
    locked = await jobs.lock(lease.job_id)
    assert locked.job.retry_count == 1
    assert [error.feedback for error in locked.earlier_errors] == ["too slow"]
    # Counted by (attempt, execution): the first one of the new attempt is another one.
    accepted = await jobs.submit(lease_of(locked), failure("PROVIDER_TIMEOUT", 1))
    assert isinstance(accepted, Accepted)
    assert accepted.job.retry_count == 2


async def test_artifacts_of_a_run_that_was_taken_over_exist_once(jobs: Jobs, late: Jobs) -> None:
    lease = await jobs.running()
    await late.lapsing.reap()
    second = lease_of(await jobs.lock(lease.job_id))
    stale = Lease(job_id=lease.job_id, attempt=second.attempt, lease_token=lease.lease_token)
    assert isinstance(await jobs.submit(stale, success()), LeaseLost)
    await jobs.submit(second, success())
    assert isinstance(await jobs.submit(lease, success()), LeaseLost)
    assert await jobs.rows(job_artifacts) == []
