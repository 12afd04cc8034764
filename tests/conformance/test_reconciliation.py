"""No job waits for ever, whatever became of its message (LC-13)."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import delete, text
from structlog.testing import capture_logs

from services.jobs.execution import Released
from services.jobs.outbox import Published, PublishFailed, SettleRequest
from services.jobs.reconciliation import Reconciliation
from services.jobs.store import jobs as job_store
from services.jobs.store.database import Transaction
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import Jobs, hello, success

LONG, ZERO = timedelta(seconds=60), timedelta(0)


async def published(jobs: Jobs) -> None:
    """Publish all events, more than a minute ago."""
    token = uuid4().hex
    for event in await jobs.claim(token, limit=100):
        await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=Published())])
    await age(jobs)


async def age(jobs: Jobs, seconds: int = 120) -> None:
    async def work(tx: Transaction) -> None:
        for table, columns in (
            ("jobs", ("created_at", "lapsed_at", "due_at")),
            ("outbox_events", ("settled_at", "available_at")),
            ("queues", ("ready_at", "ready_before_at")),
        ):
            for column in columns:
                past = f"{column} - {seconds * 1_000_000}" if tx.sqlite else f"{column} - INTERVAL {seconds} SECOND"
                await tx.execute(text(f"UPDATE {table} SET {column} = {past}"))

    await jobs.database.write(work)


async def idle(jobs: Jobs, span: timedelta = LONG, free_slots: int = 1) -> None:
    """Have an executor with a free slot, and two reports of an empty queue in the broker."""
    await depth(jobs, 0, 0)
    await jobs.sessions.open(hello("idle-executor", free_slots=free_slots, idle=span))


async def depth(jobs: Jobs, *ready: int, apart: int = 2) -> None:
    """Have a dispatcher say how many messages it sees in the broker."""
    for number in ready:
        await age(jobs, apart)
        await jobs.claim(limit=0, ready={"ai-interactive": number})


async def keys(jobs: Jobs) -> list[str]:
    """Return dispatch number and status of each enqueue event."""
    rows = [row for row in await jobs.rows(outbox_events, "id") if row["event_type"] == "ai.job.enqueue"]
    return [f"{row['dedupe_key'].rpartition(':')[2]} {row['status']}" for row in rows]


async def test_a_job_whose_message_was_lost_is_dispatched_again_once(jobs: Jobs) -> None:
    await jobs.create()
    await published(jobs)
    await idle(jobs)
    assert [await jobs.reconciliation.sweep() for _ in range(3)] == [1, 0, 0]
    assert await keys(jobs) == ["1 published", "2 pending"]


async def test_a_lapsed_run_whose_message_was_lost_is_dispatched_again(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, Released(reason="shutting down"))
    await published(jobs)
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 1
    assert await keys(jobs) == ["1 published", "2 published", "3 pending"]
    assert await jobs.history(lease.job_id) == ["created", "locked", "handed_back", "dispatched_again"]


async def test_events_that_are_gone_are_a_lost_message_too(jobs: Jobs) -> None:
    await jobs.create()
    await published(jobs)
    await jobs.database.write(lambda tx: tx.execute(delete(outbox_events)))
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 1


async def test_a_message_may_take_its_time_while_every_executor_is_busy(jobs: Jobs) -> None:
    await jobs.create()
    await published(jobs)
    assert await jobs.reconciliation.sweep() == 0
    await idle(jobs, free_slots=0)
    assert await jobs.reconciliation.sweep() == 0


async def test_an_executor_that_has_only_just_become_idle_proves_nothing(jobs: Jobs) -> None:
    await jobs.create()
    await published(jobs)
    await idle(jobs, timedelta(seconds=3))
    assert await jobs.reconciliation.sweep() == 0


async def test_a_message_that_was_only_just_sent_is_not_lost(jobs: Jobs) -> None:
    await jobs.create()
    await age(jobs)
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=Published())])
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 0


async def test_what_the_outbox_still_sends_is_not_lost(jobs: Jobs) -> None:
    await jobs.create()
    await jobs.create()
    await age(jobs)
    await jobs.claim(limit=1)
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 0


async def test_a_job_whose_event_is_dead_waits_for_an_operator(jobs: Jobs) -> None:
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    dead = PublishFailed(reason="DISPATCH_REFUSED", retryable=False)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=dead)])
    await age(jobs)
    await idle(jobs)
    with capture_logs() as logs:
        assert await jobs.reconciliation.sweep() == 0
    (line,) = [line for line in logs if "dead" in line["event"]]
    assert (line["log_level"], line["jobs"]) == ("error", 1)
    assert (line["see"], line["then"]) == (
        "aijobs outbox list --status dead --type ai.job.enqueue",
        "aijobs outbox requeue --type ai.job.enqueue",
    )


async def test_jobs_of_a_paused_queue_and_jobs_that_are_not_due_wait(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, Released(reason="later", delay=timedelta(hours=1)))
    await published(jobs)
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 0
    await jobs.create()
    await published(jobs)
    await idle(jobs)
    await jobs.operating.pause("ops", "ai-interactive", "")
    assert await jobs.reconciliation.sweep() == 0
    await jobs.operating.resume("ops", "ai-interactive")
    await idle(jobs)
    assert await jobs.reconciliation.sweep() == 1


async def test_a_lock_that_comes_between_look_and_write_stands(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await published(jobs)
    await idle(jobs)
    sweep = jobs.reconciliation
    found = await jobs.database.read(lambda tx: job_store.queued(tx, queue="", after=None, limit=10, since=ZERO))
    await jobs.lock(job_id)
    assert await jobs.database.write(lambda tx: sweep._dispatch_again(tx, found, expected=False)) == [False]


async def test_sweeps_on_every_replica_at_once_dispatch_each_job_once(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.reconciliation.CHUNK", 3)
    for _ in range(10):
        await jobs.create()
    await published(jobs)
    await idle(jobs)
    replicas = [
        Reconciliation(jobs.database, jobs.wakeups, patience=timedelta(seconds=10), interval=LONG) for _ in range(4)
    ]
    results = await asyncio.gather(*(replica.sweep() for replica in replicas))
    assert sum(results) == 10
    assert (await keys(jobs)).count("2 pending") == 10


async def test_with_an_empty_broker_every_waiting_job_is_dispatched_again(jobs: Jobs) -> None:
    """The embedded engine's broker and executor begin anew with each start."""
    await jobs.create()
    lease = await jobs.running()
    await jobs.submit(await jobs.running(), success())
    await published(jobs)
    await jobs.create()
    await jobs.lapsing.lapse_every_lease()
    assert await jobs.reconciliation.dispatch_all_again() == 1
    assert sorted(await keys(jobs)) == [
        "1 pending",
        "1 published",
        "1 published",
        "1 published",
        "2 pending",
        "2 pending",
    ]
    assert (await jobs.history(lease.job_id))[-1] == "lapsed"


@pytest.mark.parametrize("how", ["disconnected", "drained", "silent"])
async def test_an_executor_that_may_not_be_there_proves_nothing(jobs: Jobs, how: str) -> None:
    await jobs.create()
    await published(jobs)
    session = await jobs.sessions.open(hello("idle-executor", free_slots=1, idle=LONG))
    match how:
        case "disconnected":
            await jobs.sessions._disconnect(session)
        case "drained":
            await jobs.operating.drain("ops", "idle-executor")
        case _:

            async def silent(tx: Transaction) -> None:
                past = "reported_at - 20000000" if tx.sqlite else "reported_at - INTERVAL 20 SECOND"
                await tx.execute(text(f"UPDATE executors SET reported_at = {past}"))

            await jobs.database.write(silent)
    assert await jobs.reconciliation.sweep() == 0


@pytest.mark.parametrize(
    ("reports", "dispatched"),
    [((), 0), ((0,), 0), ((0, 0), 2), ((1, 0), 2), ((0, 1), 2), ((2, 0), 0), ((0, 2), 0)],
    ids=str,
)
async def test_two_reports_of_the_broker_must_show_fewer_messages_than_jobs_wait(
    jobs: Jobs, reports: tuple[int, ...], dispatched: int
) -> None:
    """LC-13: a message that is still in the broker is not lost, however long it takes."""
    await jobs.create()
    await jobs.create()
    await published(jobs)
    await depth(jobs, *reports)
    await jobs.sessions.open(hello("idle-executor", free_slots=1, idle=LONG))
    assert await jobs.reconciliation.sweep() == dispatched


async def test_old_reports_of_the_broker_say_nothing(jobs: Jobs) -> None:
    await jobs.create()
    await published(jobs)
    await depth(jobs, 0, 0)
    await age(jobs)
    await jobs.sessions.open(hello("idle-executor", free_slots=1, idle=LONG))
    assert await jobs.reconciliation.sweep() == 0
