"""Jobs that cannot start now: not due, paused, of a type that the executor does not know (case L9, ruling 20)."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from aijobs.errors import InvalidInput, JobNotReady
from services.jobs.execution import Released
from services.jobs.leasing import LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import BACKEND, Jobs, hello


async def enqueued(jobs: Jobs, job_id: str) -> list[str]:
    rows = [row for row in await jobs.rows(outbox_events, "id") if row["aggregate_id"] == job_id]
    return [f"{row['dedupe_key'].rpartition(':')[2]} {row['status']}" for row in rows]


async def test_a_job_waits_until_it_is_due(jobs: Jobs) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    created = await jobs.create(run_at=soon)
    assert created.job.run_at == created.job.due_at == soon
    assert await jobs.claim() == []
    (event,) = await jobs.rows(outbox_events)
    assert event["available_at"] == soon


async def test_a_time_in_the_past_is_at_once(jobs: Jobs) -> None:
    created = await jobs.create(run_at=datetime.now(UTC) - timedelta(days=1))
    assert [event.aggregate_id for event in await jobs.claim()] == [created.job.job_id]
    await jobs.lock(created.job.job_id)


async def test_a_time_that_is_more_than_a_year_ahead_is_refused(jobs: Jobs) -> None:
    with pytest.raises(AssertionError, match="run_at"):
        await jobs.create(run_at=datetime.now(UTC) + timedelta(days=400))


async def test_a_message_that_comes_before_its_job_is_due_leads_to_another_one(jobs: Jobs) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    job_id = (await jobs.create(run_at=due)).job.job_id
    assert isinstance(await jobs.try_lock(job_id), JobNotReady)
    assert await enqueued(jobs, job_id) == ["1 scheduled", "2 scheduled"]
    assert {row["available_at"] for row in await jobs.rows(outbox_events)} == {due}
    assert await jobs.claim() == [], "no hot loop"


async def test_jobs_of_a_paused_queue_are_neither_claimed_nor_locked_and_go_on_when_it_is_resumed(jobs: Jobs) -> None:
    in_broker, waiting = (await jobs.create()).job.job_id, (await jobs.create()).job.job_id
    await jobs.claim(limit=1)
    await jobs.operating.pause("ops", "ai-interactive", "the model is down")
    assert isinstance(await jobs.try_lock(in_broker), JobNotReady)
    assert await jobs.claim() == []
    assert await enqueued(jobs, in_broker) == ["1 processing", "2 pending"]
    await jobs.operating.resume("ops", "ai-interactive")
    assert {event.aggregate_id for event in await jobs.claim()} == {in_broker, waiting}
    await jobs.lock(in_broker)


async def test_ends_are_told_while_a_queue_is_paused(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await jobs.operating.pause("ops", "ai-interactive", "")
    await jobs.cancel(job_id)
    assert [event.event_type for event in await jobs.claim()] == ["ai.job.cancelled"]


async def test_resuming_wakes_a_waiting_claim(jobs: Jobs) -> None:
    await jobs.create()
    await jobs.operating.pause("ops", "ai-interactive", "")
    claiming = asyncio.create_task(jobs.claim(wait=timedelta(seconds=20)))
    await asyncio.sleep(0)
    await jobs.operating.resume("ops", "ai-interactive")
    async with asyncio.timeout(5):
        assert len(await claiming) == 1


async def test_a_backlog_in_one_queue_holds_up_no_other_event(jobs: Jobs) -> None:
    first = (await jobs.create()).job.job_id
    for _ in range(30):
        await jobs.create()
    await jobs.cancel(first)
    claimed = [event.event_type for _ in range(30) for event in await jobs.claim(limit=1)]
    assert "ai.job.cancelled" in claimed


async def test_who_paused_a_queue_first_and_why_is_kept(jobs: Jobs) -> None:
    await jobs.operating.pause("ops-1", "ai-background", "first")
    again = await jobs.operating.pause("ops-2", "ai-background", "second")
    assert (again.paused_by, again.reason) == ("ops-1", "first")
    assert [(row.queue, row.paused_at is not None) for row in await jobs.operating.queues()] == [
        ("ai-background", True),
        ("ai-interactive", False),
    ]
    resumed = await jobs.operating.resume("ops-2", "ai-background")
    assert (resumed.paused_at, resumed.paused_by, resumed.reason) == (None, "", "")
    with pytest.raises(InvalidInput):
        await jobs.operating.pause("ops", "ai-analysis", "")
    with pytest.raises(InvalidInput):
        await jobs.operating.resume("ops", "")


async def test_an_executor_gets_no_job_of_a_type_that_it_did_not_name(jobs: Jobs) -> None:
    await jobs.create(job_type="patient")
    (event,) = await jobs.claim()
    jobs.opened["newer"] = await jobs.sessions.open(hello("newer", "patient"))
    jobs.opened["older"] = await jobs.sessions.open(hello("older", "testing"))
    assert isinstance(await jobs.try_lock(event.aggregate_id, executor_id="older"), JobNotReady)
    assert await enqueued(jobs, event.aggregate_id) == ["1 processing", "2 scheduled"]
    assert await jobs.claim() == [], "available again after five seconds"
    # The delay is that of the dispatch, not of the job: but then nobody knows when a message comes, so it is kept.
    assert isinstance(await jobs.try_lock(event.aggregate_id, executor_id="newer"), JobNotReady)


async def test_a_batch_with_one_job_that_is_not_ready_locks_the_others(jobs: Jobs) -> None:
    ready = (await jobs.create()).job.job_id
    waiting = (await jobs.create(run_at=datetime.now(UTC) + timedelta(hours=1))).job.job_id
    items = [LockRequest(job_id=job_id, lease_token=job_id[:32]) for job_id in (waiting, ready, waiting)]
    results = await jobs.leasing.lock(await jobs.holder(), items)
    assert [type(result).__name__ for result in results] == ["JobNotReady", "Locked", "JobNotReady"]
    assert await jobs.history(waiting) == ["created", "dispatched_again"]


async def test_a_lapsed_run_that_is_not_ready_stays_lapsed_and_is_dispatched_again(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, Released(reason="later", delay=timedelta(hours=1)))
    assert isinstance(await jobs.try_lock(lease.job_id), JobNotReady)
    job = (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job
    assert (job.lifecycle_status, job.waits, job.dispatch_no) == ("running", True, 3)
    assert job.attempt == Lease(job_id=lease.job_id, attempt=1, lease_token=lease.lease_token).attempt


async def test_a_repeated_lock_that_was_refused_is_refused_again_and_dispatches_nothing(jobs: Jobs) -> None:
    """Ruling 33: the answer was lost, and the repeat has no second effect."""
    job_id = (await jobs.create()).job.job_id
    await jobs.operating.pause("ops", "ai-interactive", "")
    token = "t" * 32
    assert isinstance(await jobs.try_lock(job_id, token), JobNotReady)
    assert isinstance(await jobs.try_lock(job_id, token), JobNotReady)
    assert await enqueued(jobs, job_id) == ["1 pending", "2 pending"]
    await jobs.operating.resume("ops", "ai-interactive")
    assert isinstance(await jobs.try_lock(job_id, token), JobNotReady), "whoever sent it has acknowledged the message"
    await jobs.lock(job_id)


async def test_a_job_of_a_type_that_nobody_knows_is_tried_ever_more_seldom(jobs: Jobs) -> None:
    job_id = (await jobs.create(job_type="patient")).job.job_id
    jobs.opened["older"] = await jobs.sessions.open(hello("older", "testing"))
    waits = []
    for _ in range(9):
        await jobs.try_lock(job_id, executor_id="older")
        job = (await jobs.queries.get(BACKEND, job_id, full=False)).job
        assert job.due_at is not None
        waits.append(round((job.due_at - job.read_at).total_seconds()))

        async def due(tx) -> None:
            await tx.execute(update(jobs_table).values(due_at=None))

        await jobs.database.write(due)
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600]
