"""A check finds what is not as it must be, repairs what can be, and tells nothing of an engine that is well."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import delete, text, update

from services.jobs import inspection
from services.jobs.consistency import LOOK_BACK, look_back
from services.jobs.execution import Released
from services.jobs.findings import MOST_LISTED, Finding, FindingKind, Report
from services.jobs.outbox import Published, PublishFailed, SettleRequest
from services.jobs.store.database import Transaction
from services.jobs.store.tables import dispatchers, outbox_events
from services.jobs.store.tables import jobs as jobs_table
from tests.conformance.conftest import Jobs, failure, hello, lease_of, success

LONG = timedelta(seconds=60)
REFUSED = PublishFailed(reason="DISPATCH_REFUSED", retryable=False)


async def settle_all(jobs: Jobs, result: Published | PublishFailed) -> None:
    token = uuid4().hex
    events = await jobs.claim(token, limit=100)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=result) for event in events])


async def served(jobs: Jobs, *, free_slots: int = 0, idle: timedelta = timedelta(0)) -> None:
    """Have a dispatcher, and an executor of the queue."""
    await jobs.claim(limit=0, ready={"ai-interactive": 0})
    await jobs.sessions.open(hello("there", free_slots=free_slots, idle=idle))


async def back(jobs: Jobs, columns: Mapping[str, str], seconds: int) -> None:
    """Let stored times lie further back."""

    async def work(tx: Transaction) -> None:
        for column, table in columns.items():
            past = f"{column} - {seconds * 1_000_000}" if tx.sqlite else f"{column} - INTERVAL {seconds} SECOND"
            await tx.execute(text(f"UPDATE {table} SET {column} = {past}"))

    await jobs.database.write(work)


async def forget_events(jobs: Jobs) -> None:
    await jobs.database.write(lambda tx: tx.execute(delete(outbox_events)))


async def check(jobs: Jobs, *, repair: bool = False) -> Report:
    return await jobs.consistency.check("ops", repair=repair)


def told(report: Report) -> list[tuple[str, str, bool]]:
    """Return kind, job and whether it was repaired of each finding."""
    for finding in report.findings:
        assert finding.problem
        assert finding.advice
    return [(str(finding.kind), finding.job_id, finding.repaired) for finding in report.findings]


async def test_an_engine_that_is_well_gets_an_empty_report(jobs: Jobs) -> None:
    """Jobs in every state, events in every status that is no fault."""
    await served(jobs)
    await jobs.create()
    await settle_all(jobs, Published())
    await jobs.create()
    await jobs.running()
    await jobs.submit(await jobs.running(), success())
    await jobs.submit(await jobs.running(job_type="impatient"), failure("PROVIDER_REFUSED"))
    await jobs.cancel((await jobs.create()).job.job_id)
    await jobs.submit(await jobs.running(), Released(reason="later", delay=timedelta(hours=1)))
    await jobs.submit(await jobs.running(), Released(reason="shutting down"))
    for repair in (False, True):
        before = [await jobs.rows(table, "job_id") for table in (jobs_table,)]
        report = await check(jobs, repair=repair)
        assert (told(report), report.found, report.left) == ([], {}, 0)
        assert [await jobs.rows(table, "job_id") for table in (jobs_table,)] == before


@pytest.mark.parametrize("how", ["gone", "discarded"])
@pytest.mark.parametrize("state", ["queued", "lapsed", "not due"])
async def test_a_waiting_job_without_an_event_is_dispatched_again(jobs: Jobs, how: str, state: str) -> None:
    await served(jobs)
    if state == "queued":
        job_id = (await jobs.create()).job.job_id
    else:
        lease = await jobs.running()
        delay = timedelta(0) if state == "lapsed" else timedelta(hours=1)
        await jobs.submit(lease, Released(reason="x", delay=delay))
        job_id = lease.job_id
    if how == "gone":
        await forget_events(jobs)
    else:
        values = {"status": "discarded", "available_at": None, "settled_at": outbox_events.c.created_at}
        await jobs.database.write(lambda tx: tx.execute(update(outbox_events).values(**values)))
    assert told(await check(jobs)) == [("event_missing", job_id, False)]
    assert (await jobs.history(job_id))[-1] != "dispatched_again"
    report = await check(jobs, repair=True)
    assert (told(report), report.left) == ([("event_missing", job_id, True)], 0)
    assert (await jobs.history(job_id))[-1] == "dispatched_again"
    last = (await jobs.rows(outbox_events, "id"))[-1]
    assert (last["aggregate_id"], last["status"]) == (job_id, "scheduled" if state == "not due" else "pending")
    assert told(await check(jobs)) == []


async def test_a_job_whose_event_is_dead_is_told_with_the_command_and_requeued(jobs: Jobs) -> None:
    await served(jobs)
    job_id = (await jobs.create()).job.job_id
    await settle_all(jobs, REFUSED)
    (row,) = await jobs.rows(outbox_events, "id")
    report = await check(jobs)
    assert told(report) == [("event_dead", job_id, False)]
    assert report.findings[0].advice == f"requeue it: aijobs outbox requeue {row['event_id']}"
    assert told(await check(jobs, repair=True)) == [("event_dead", job_id, True)]
    (event,) = await jobs.claim()
    assert event.event_id == row["event_id"]
    assert told(await check(jobs)) == []


async def test_a_dead_event_that_no_job_waits_for_is_no_finding(jobs: Jobs) -> None:
    await served(jobs)
    job_id = (await jobs.create()).job.job_id
    await settle_all(jobs, REFUSED)
    await jobs.cancel(job_id)
    assert told(await check(jobs)) == []


async def test_a_lost_message_is_judged_as_the_sweep_does(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await settle_all(jobs, Published())
    await served(jobs)
    assert told(await check(jobs)) == [], "no executor is idle"
    await back(jobs, {"created_at": "jobs", "settled_at": "outbox_events"}, 120)
    for _ in range(2):
        await back(jobs, {"ready_at": "queues", "ready_before_at": "queues"}, 2)
        await served(jobs, free_slots=1, idle=LONG)
    assert told(await check(jobs)) == [("message_lost", job_id, False)]
    assert told(await check(jobs, repair=True)) == [("message_lost", job_id, True)]
    assert told(await check(jobs)) == []
    assert await jobs.reconciliation.sweep() == 0


async def test_a_missing_event_is_told_once_although_the_sweep_would_find_it_too(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await forget_events(jobs)
    await back(jobs, {"created_at": "jobs"}, 120)
    for _ in range(2):
        await back(jobs, {"ready_at": "queues", "ready_before_at": "queues"}, 2)
        await served(jobs, free_slots=1, idle=LONG)
    assert told(await check(jobs)) == [("event_missing", job_id, False)]


async def test_a_run_whose_lease_ended_long_ago_is_reaped(jobs: Jobs) -> None:
    await served(jobs)
    lease = await jobs.running()
    await back(jobs, {"lock_until": "jobs"}, 60 + 31)
    assert told(await check(jobs)) == [("lease_overdue", lease.job_id, False)]
    assert told(await check(jobs, repair=True)) == [("lease_overdue", lease.job_id, True)]
    assert (await jobs.history(lease.job_id))[-1] == "lapsed"
    assert told(await check(jobs)) == []


async def test_a_lease_within_its_grace_is_nobodys_business(jobs: Jobs) -> None:
    await served(jobs)
    lease = await jobs.running()
    await back(jobs, {"lock_until": "jobs"}, 60 + 25)
    assert told(await check(jobs, repair=True)) == []
    assert (await jobs.history(lease.job_id))[-1] == "locked"


@pytest.mark.parametrize("how", ["none", "disconnected", "draining", "of another queue"])
async def test_jobs_that_nobody_will_run_are_told_by_queue(jobs: Jobs, how: str) -> None:
    await jobs.create()
    await jobs.claim(limit=0)
    match how:
        case "disconnected":
            await jobs.sessions._disconnect(await jobs.sessions.open(hello("e")))
        case "draining":
            await jobs.sessions.open(hello("e"))
            await jobs.operating.drain("ops", "e")
        case "of another queue":
            await jobs.sessions.open(hello("e"))
            other = update(jobs_table).values(queue="ai-background")
            await jobs.database.write(lambda tx: tx.execute(other))
    report = await check(jobs, repair=True)
    assert told(report) == [("no_executor", "", False)]
    assert report.findings[0].queue == ("ai-background" if how == "of another queue" else "ai-interactive")
    assert report.findings[0].problem.startswith("1 jobs wait")
    assert report.left == 1


async def test_what_waits_for_a_dispatcher_is_told_by_queue(jobs: Jobs) -> None:
    await jobs.create()
    await served(jobs)
    await jobs.submit(await jobs.running(), success())
    await back(jobs, {"seen_at": "dispatchers"}, 60)
    report = await check(jobs)
    assert [(finding.kind, finding.queue) for finding in report.findings] == [
        (FindingKind.NO_DISPATCHER, ""),
        (FindingKind.NO_DISPATCHER, "ai-interactive"),
    ]
    await jobs.database.write(lambda tx: tx.execute(delete(dispatchers)))
    assert len((await check(jobs)).findings) == 2
    await served(jobs)
    assert told(await check(jobs)) == []


async def test_nobody_has_to_serve_a_paused_queue_or_one_in_which_nothing_waits(jobs: Jobs) -> None:
    assert told(await check(jobs)) == []
    await jobs.create()
    await jobs.operating.pause("ops", "ai-interactive", "")
    assert told(await check(jobs)) == []


async def test_parked_events_are_told_by_type(jobs: Jobs) -> None:
    await served(jobs)
    await jobs.create()
    other = update(outbox_events).values(event_type="ai.job.praised", dedupe_key="ai.job.praised:x:1")
    await jobs.database.write(lambda tx: tx.execute(other))
    report = await check(jobs, repair=True)
    assert [(finding.kind, finding.repaired) for finding in report.findings] == [
        (FindingKind.EVENTS_PARKED, False),
        (FindingKind.EVENT_MISSING, True),
    ]
    assert "ai.job.praised" in report.findings[0].problem


async def test_an_end_without_an_event_is_told_while_its_event_must_be_there(jobs: Jobs) -> None:
    await served(jobs)
    lease = await jobs.running()
    await jobs.submit(lease, success())
    await forget_events(jobs)
    assert told(await check(jobs, repair=True)) == [("end_event_missing", lease.job_id, False)]
    await back(jobs, {"finished_at": "jobs"}, 24 * 3600)
    assert told(await check(jobs)) == []


def test_ends_are_not_asked_for_longer_than_events_are_kept() -> None:
    day = timedelta(days=1)
    assert look_back(day, 7 * day) == LOOK_BACK
    assert look_back(timedelta(hours=1), 7 * day) == timedelta(minutes=57.5)


async def test_everything_is_read_page_by_page(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.consistency.CHUNK", 2)
    monkeypatch.setattr("services.jobs.inspection.CHUNK", 2)
    for smaller in ("reconciliation", "lapsing", "outbox_admin"):
        monkeypatch.setattr(f"services.jobs.{smaller}.CHUNK", 1)
    await served(jobs)
    leases = [await jobs.running() for _ in range(9)]
    for lease in leases[:3]:
        await jobs.submit(lease, success())
    for lease in leases[3:6]:
        await jobs.submit(lease, Released(reason="x"))
    for _ in range(3):
        await jobs.create()
    await forget_events(jobs)
    await back(jobs, {"lock_until": "jobs"}, 200)
    kinds = {FindingKind.END_EVENT_MISSING: 3, FindingKind.EVENT_MISSING: 6, FindingKind.LEASE_OVERDUE: 3}
    assert (await check(jobs)).found == kinds
    report = await check(jobs, repair=True)
    assert (report.found, report.left) == (kinds, 3)
    assert (await check(jobs)).found == {FindingKind.END_EVENT_MISSING: 3}


async def test_ends_at_the_same_moment_are_all_looked_at(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr(inspection, "CHUNK", 2)
    await served(jobs)
    for _ in range(5):
        await jobs.submit(await jobs.running(), success())
    await forget_events(jobs)
    first = (await jobs.rows(jobs_table, "job_id"))[0]["finished_at"]
    await jobs.database.write(lambda tx: tx.execute(update(jobs_table).values(finished_at=first)))
    assert (await check(jobs)).found == {FindingKind.END_EVENT_MISSING: 5}


async def test_of_many_checks_at_once_one_repairs_each_thing(jobs: Jobs) -> None:
    await served(jobs)
    for _ in range(5):
        await jobs.create()
    await settle_all(jobs, REFUSED)
    for _ in range(5):
        await jobs.create()
    pending = delete(outbox_events).where(outbox_events.c.status == "pending")
    await jobs.database.write(lambda tx: tx.execute(pending))
    reports = await asyncio.gather(*(check(jobs, repair=True) for _ in range(4)))
    assert [report.left for report in reports] == [0] * 4
    assert sum(report.repaired.total() for report in reports) == 10
    assert told(await check(jobs)) == []


async def test_a_job_that_goes_on_between_look_and_repair_is_no_finding(jobs: Jobs, monkeypatch) -> None:
    await served(jobs)
    job_id = (await jobs.create()).job.job_id
    await forget_events(jobs)
    again = jobs.reconciliation.dispatch_again

    async def late(lost):
        if lost:
            await jobs.lock(job_id)
        return await again(lost)

    monkeypatch.setattr(jobs.reconciliation, "dispatch_again", late)
    assert told(await check(jobs, repair=True)) == []
    assert await jobs.history(job_id) == ["created", "locked"]


async def test_checks_tell_nothing_of_an_engine_at_work(jobs: Jobs) -> None:
    """Jobs are created, locked, given back and ended all the time while it is looked through."""
    await served(jobs)
    working = True

    async def work(number: int) -> None:
        executor = f"executor-{number}"
        while working:
            created = await jobs.create(user_id=f"user-{number}")
            lease = lease_of(await jobs.lock(created.job.job_id, executor_id=executor))
            await jobs.submit(lease, Released(reason="x"), executor)
            await jobs.cancel(created.job.job_id)

    workers = [asyncio.create_task(work(number)) for number in range(3)]
    try:
        reports = [await check(jobs, repair=bool(turn % 2)) for turn in range(10)]
    finally:
        working = False
        await asyncio.gather(*workers)
    assert [told(report) for report in reports] == [[]] * 10


def test_a_thousand_are_listed_those_that_are_left_first_and_all_are_counted() -> None:
    report = Report()
    for number in range(MOST_LISTED + 500):
        report.add(Finding(kind=FindingKind.EVENT_DEAD, problem="p", advice="a", repaired=number >= 10))
    assert len(report.findings) == MOST_LISTED
    assert [finding.repaired for finding in report.findings[:11]] == [False] * 10 + [True]
    assert (report.found.total(), report.left) == (MOST_LISTED + 500, 10)
