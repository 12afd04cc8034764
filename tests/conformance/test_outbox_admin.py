"""OB-3, OB-5: operators see the events, requeue dead ones and give up others, and no job is left without its event."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import RowMapping, text, update

from aijobs.errors import (
    AijobsError,
    EventClaimed,
    EventNeeded,
    EventNotDead,
    EventNotDiscardable,
    EventNotFound,
    InvalidInput,
)
from services.jobs.claim_release import DEAD, PARKED
from services.jobs.execution import Released
from services.jobs.outbox import DIED, Published, PublishFailed, SettleRequest
from services.jobs.outbox_admin import EventResult, Outcome
from services.jobs.store import outbox
from services.jobs.store.database import Transaction
from services.jobs.store.outbox import EventStatus, NewEvent
from services.jobs.store.outbox_admin import EventFilter
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import Jobs, ObservedSignal, lease_of, success

REFUSED = PublishFailed(reason="DISPATCH_REFUSED", retryable=False)
ALL = EventFilter()


async def settle_all(jobs: Jobs, result: Published | PublishFailed, token: str = "") -> list[str]:
    """Claim what is pending, settle it, and return the ids of the events."""
    token = token or uuid4().hex
    claimed = await jobs.claim(token, limit=100)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=result) for event in claimed])
    return [event.event_id for event in claimed]


async def dead_event(jobs: Jobs) -> tuple[str, str]:
    """Create a job whose event is dead; return the ids of the job and of the event."""
    job_id = (await jobs.create()).job.job_id
    (event_id,) = await settle_all(jobs, REFUSED)
    return job_id, event_id


async def row_of(jobs: Jobs, event_id: str) -> RowMapping:
    return next(row for row in await jobs.rows(outbox_events, "id") if row["event_id"] == event_id)


async def park(jobs: Jobs, count: int = 1) -> list[str]:
    """Write pending events of a type that no dispatcher knows."""
    ids = [str(uuid4()) for _ in range(count)]
    new = [
        NewEvent(
            event_id=event_id,
            event_type="ai.job.praised",
            aggregate_type="AiJob",
            aggregate_id=str(uuid4()),
            dedupe_key=f"ai.job.praised:{event_id}:1",
            payload_json="{}",
        )
        for event_id in ids
    ]
    await jobs.database.write(lambda tx: outbox.append(tx, new))
    return ids


def outcomes(results: list[EventResult]) -> list[object]:
    return [type(each.result) if isinstance(each.result, AijobsError) else each.result for each in results]


async def test_events_are_listed_newest_first_page_by_page(jobs: Jobs) -> None:
    for _ in range(5):
        await jobs.create()
    every = [row["event_id"] for row in reversed(await jobs.rows(outbox_events, "id"))]
    for statuses in ([], [EventStatus.PENDING], [EventStatus.PENDING, EventStatus.DEAD]):
        seen: list[str] = []
        token = ""
        while True:
            page = await jobs.event_queries.page(ALL, statuses=statuses, size=2, token=token)
            seen += [event.event_id for event in page.events]
            token = page.next_page_token
            if not token:
                break
        assert seen == every


async def test_a_list_fits_every_filter(jobs: Jobs) -> None:
    dead_job, dead_id = await dead_event(jobs)
    lease = await jobs.running()
    await jobs.submit(lease, success())
    held = uuid4().hex
    (first, second) = await jobs.claim(held, limit=2)

    async def listed(wanted: EventFilter = ALL, *statuses: EventStatus) -> set[str]:
        return {event.event_id for event in (await jobs.event_queries.page(wanted, statuses=statuses)).events}

    assert await listed(ALL, EventStatus.DEAD) == {dead_id}
    assert await listed(ALL, EventStatus.PROCESSING) == {first.event_id, second.event_id}
    assert await listed(ALL, EventStatus.DEAD, EventStatus.PROCESSING) == {dead_id, first.event_id, second.event_id}
    assert await listed(EventFilter(job_id=dead_job)) == {dead_id}
    assert await listed(EventFilter(job_id=dead_job), EventStatus.PENDING) == set()
    assert len(await listed(EventFilter(event_type="ai.job.completed"))) == 1
    assert len(await listed(EventFilter(queue="ai-interactive"))) == 2
    assert await listed(EventFilter(queue="ai-background")) == set()
    assert await listed(EventFilter(queue="ai-interactive", event_type="ai.job.enqueue"), EventStatus.DEAD) == {dead_id}


async def test_an_event_shows_what_became_of_it_and_who_has_it(jobs: Jobs) -> None:
    job_id, event_id = await dead_event(jobs)
    await jobs.create()
    await jobs.claim(uuid4().hex)
    held, dead = (await jobs.event_queries.page(ALL)).events
    assert (dead.event_id, dead.aggregate_id, dead.status, dead.attempt_count, dead.last_error) == (
        event_id,
        job_id,
        EventStatus.DEAD,
        1,
        "DISPATCH_REFUSED",
    )
    assert dead.dedupe_key == f"ai.job.enqueue:{job_id}:1"
    assert dead.settled_at is not None
    assert (held.status, held.locked_by, held.settled_at) == (EventStatus.PROCESSING, "dispatcher-1", None)
    assert held.claim_until is not None


@pytest.mark.parametrize(("size", "token"), [(-1, ""), (101, ""), (0, "x"), (0, "-1"), (0, "9" * 30), (0, "²")])
async def test_a_page_that_cannot_be_is_refused(jobs: Jobs, size: int, token: str) -> None:
    with pytest.raises(InvalidInput):
        await jobs.event_queries.page(ALL, size=size, token=token)


async def test_dead_and_parked_events_are_counted(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.event_queries.MOST_COUNTED", 3)
    died = DIED._value.get()
    await dead_event(jobs)
    await park(jobs, 5)
    counts = await jobs.event_queries.counts()
    assert {status: count for status, count in counts.by_status.items() if count} == {
        EventStatus.DEAD: 1,
        EventStatus.PENDING: 3,
    }
    assert counts.parked == {"ai.job.praised": 3}
    assert DIED._value.get() == died + 1


async def test_while_no_dispatcher_is_there_nobody_knows_what_is_parked(jobs: Jobs) -> None:
    await park(jobs)
    assert (await jobs.event_queries.counts()).parked == {}


async def test_a_requeued_event_is_published_at_its_old_place_with_all_attempts(jobs: Jobs) -> None:
    _, event_id = await dead_event(jobs)
    before = await row_of(jobs, event_id)
    later = (await jobs.create()).job.job_id
    assert outcomes(await jobs.outbox_admin.requeue("ops", [event_id])) == [Outcome.REQUEUED]
    after = await row_of(jobs, event_id)
    assert (after["status"], after["attempt_count"], after["settled_at"]) == ("pending", 0, None)
    assert after["rank_at"] == before["rank_at"]
    first, second = await jobs.claim()
    assert (first.event_id, second.aggregate_id) == (event_id, later)


async def test_a_requeue_wakes_a_waiting_claim(jobs: Jobs, monkeypatch) -> None:
    """The fallback poll is out of play."""
    monkeypatch.setattr("services.jobs.outbox.POLL_INTERVAL", timedelta(seconds=20))
    _, event_id = await dead_event(jobs)
    jobs.wakeups.events = signal = ObservedSignal()
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(jobs.claim(wait=timedelta(seconds=20)))
        await signal.awaited.wait()
        await jobs.outbox_admin.requeue("ops", [event_id])
        (event,) = await waiting
    assert event.event_id == event_id


async def test_a_late_settle_of_the_claim_under_which_it_died_changes_nothing(jobs: Jobs) -> None:
    await jobs.create()
    token = uuid4().hex
    (event_id,) = await settle_all(jobs, REFUSED, token)
    await jobs.outbox_admin.requeue("ops", [event_id])
    assert await jobs.outbox.settle(token, [SettleRequest(event_id=event_id, result=REFUSED)]) == [None]
    assert await jobs.claim(token) == [], "a late copy of the claim gets nothing: its answer goes to nobody"
    assert (await row_of(jobs, event_id))["status"] == "pending"


async def test_only_dead_events_are_requeued_and_each_is_answered(jobs: Jobs) -> None:
    job_id, dead_id = await dead_event(jobs)
    await jobs.create()
    (pending_id,) = [row["event_id"] for row in await jobs.rows(outbox_events, "id") if row["status"] == "pending"]
    results = await jobs.outbox_admin.requeue("ops", [pending_id, "unknown", dead_id, dead_id])
    assert outcomes(results) == [EventNotDead, EventNotFound, Outcome.REQUEUED, Outcome.REQUEUED]
    assert [each.event_id for each in results] == [pending_id, "unknown", dead_id, dead_id]
    assert results[2].job_id == job_id
    assert outcomes(await jobs.outbox_admin.requeue("ops", [dead_id])) == [EventNotDead]


@pytest.mark.parametrize("how", ["cancelled", "running", "dispatched again", "gone"])
async def test_a_dispatch_that_leads_nowhere_any_more_is_discarded_instead(jobs: Jobs, how: str) -> None:
    job_id, event_id = await dead_event(jobs)
    match how:
        case "cancelled":
            await jobs.cancel(job_id)
        case "running":
            await jobs.lock(job_id)
        case "dispatched again":
            lease = lease_of(await jobs.lock(job_id))
            await jobs.submit(lease, Released(reason="shutting down"))
        case _:
            gone = update(outbox_events).values(aggregate_id=str(uuid4()))
            await jobs.database.write(lambda tx: tx.execute(gone))
    assert outcomes(await jobs.outbox_admin.requeue("ops", [event_id], dry_run=True)) == [Outcome.DISCARDED]
    assert (await row_of(jobs, event_id))["status"] == "dead"
    assert outcomes(await jobs.outbox_admin.requeue("ops", [event_id])) == [Outcome.DISCARDED]
    assert (await row_of(jobs, event_id))["status"] == "discarded"


async def test_an_event_that_tells_of_an_end_is_always_worth_another_try(jobs: Jobs) -> None:
    await jobs.submit(await jobs.running(), success())
    await settle_all(jobs, REFUSED)
    ends = [row["event_id"] for row in await jobs.rows(outbox_events, "id") if row["event_type"] == "ai.job.completed"]
    assert outcomes(await jobs.outbox_admin.requeue("ops", ends)) == [Outcome.REQUEUED]


async def test_a_dry_run_changes_nothing(jobs: Jobs) -> None:
    await dead_event(jobs)
    before = await jobs.rows(outbox_events, "id")
    results, more = await jobs.outbox_admin.requeue_dead("ops", ALL, dry_run=True)
    assert (outcomes(results), more) == ([Outcome.REQUEUED], False)
    assert await jobs.rows(outbox_events, "id") == before


async def test_dead_events_are_requeued_by_a_filter_in_small_steps(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.outbox_admin.CHUNK", 2)
    monkeypatch.setattr("services.jobs.outbox_admin.MOST_REQUEUED", 4)
    for _ in range(5):
        await jobs.create()
    ids = await settle_all(jobs, REFUSED)
    assert await jobs.outbox_admin.requeue_dead("ops", EventFilter(queue="ai-background")) == ([], False)
    assert await jobs.outbox_admin.requeue_dead("ops", EventFilter(event_type="ai.job.failed")) == ([], False)
    results, more = await jobs.outbox_admin.requeue_dead("ops", EventFilter(queue="ai-interactive"))
    assert ([each.event_id for each in results], more) == (ids[:4], True)
    (job_id,) = [row["aggregate_id"] for row in await jobs.rows(outbox_events, "id") if row["status"] == "dead"]
    results, more = await jobs.outbox_admin.requeue_dead("ops", EventFilter(job_id=job_id))
    assert ([each.event_id for each in results], more) == (ids[4:], False)


async def test_one_of_many_operators_requeues_and_the_others_hear_so(jobs: Jobs) -> None:
    _, event_id = await dead_event(jobs)
    answers = await asyncio.gather(*(jobs.outbox_admin.requeue("ops", [event_id]) for _ in range(5)))
    found = [outcomes(answer)[0] for answer in answers]
    assert found.count(Outcome.REQUEUED) == 1
    assert found.count(EventNotDead) == 4


async def test_parked_events_can_be_given_up_and_are_not_claimed_afterwards(jobs: Jobs) -> None:
    ids = await park(jobs, 2)
    assert outcomes(await jobs.outbox_admin.discard("ops", ids)) == [Outcome.DISCARDED] * 2
    assert outcomes(await jobs.outbox_admin.discard("ops", ids)) == [Outcome.DISCARDED] * 2, "a repeat is no fault"
    assert [row["status"] for row in await jobs.rows(outbox_events, "id")] == ["discarded"] * 2
    assert await jobs.claim(event_types=["ai.job.praised"]) == []


@pytest.mark.parametrize("status", ["dead", "pending", "scheduled"])
async def test_the_event_that_a_job_waits_for_cannot_be_discarded(jobs: Jobs, status: str) -> None:
    match status:
        case "dead":
            await dead_event(jobs)
        case "pending":
            await jobs.create()
        case _:
            await jobs.submit(await jobs.running(), Released(reason="later", delay=timedelta(hours=1)))
    row = (await jobs.rows(outbox_events, "id"))[-1]
    assert row["status"] == status
    assert outcomes(await jobs.outbox_admin.discard("ops", [row["event_id"]])) == [EventNeeded]
    assert (await row_of(jobs, row["event_id"]))["status"] == status


async def test_what_leads_nowhere_can_be_discarded_in_any_status_that_is_not_settled(jobs: Jobs) -> None:
    job_id, dead_id = await dead_event(jobs)
    await jobs.cancel(job_id)
    lease = await jobs.running()
    await jobs.submit(lease, Released(reason="later", delay=timedelta(hours=1)))
    scheduled_id = (await jobs.rows(outbox_events, "id"))[-1]["event_id"]
    await jobs.cancel(lease.job_id)
    ends = [row["event_id"] for row in await jobs.rows(outbox_events, "id") if row["event_type"] == "ai.job.cancelled"]
    results = await jobs.outbox_admin.discard("ops", [dead_id, scheduled_id, *ends])
    assert outcomes(results) == [Outcome.DISCARDED] * 4


async def test_published_and_claimed_events_are_not_discarded(jobs: Jobs) -> None:
    await jobs.create()
    (published_id,) = await settle_all(jobs, Published())
    (parked_id,) = await park(jobs)
    await jobs.claim(event_types=["ai.job.praised"])
    results = await jobs.outbox_admin.discard("ops", [published_id, parked_id, "unknown"])
    assert outcomes(results) == [EventNotDiscardable, EventClaimed, EventNotFound]
    assert isinstance(results[1].result, AijobsError)
    assert "claimed just now, by dispatcher dispatcher-1" in results[1].result.message


async def test_of_a_claim_and_a_discard_one_gets_the_event(jobs: Jobs) -> None:
    for _ in range(10):
        (event_id,) = await park(jobs)
        claimed, results = await asyncio.gather(
            jobs.claim(event_types=["ai.job.praised"], limit=1), jobs.outbox_admin.discard("ops", [event_id])
        )
        status = (await row_of(jobs, event_id))["status"]
        if outcomes(results) == [Outcome.DISCARDED]:
            assert status == "discarded"
            assert event_id not in [event.event_id for event in claimed]
        else:
            assert [event.event_id for event in claimed] == [event_id]


async def test_the_number_of_dead_events_is_there_for_an_alarm(jobs: Jobs) -> None:
    await dead_event(jobs)
    await dead_event(jobs)
    await jobs.claim_release.look_for_dead()
    assert DEAD._value.get() == 2

    async def requeued(tx: Transaction) -> None:
        await tx.execute(text("UPDATE outbox_events SET status = 'published'"))

    await jobs.database.write(requeued)
    await jobs.claim_release.look_for_dead()
    assert DEAD._value.get() == 0


async def test_parked_events_are_there_for_an_alarm_while_a_dispatcher_is(jobs: Jobs) -> None:
    ids = await park(jobs, 2)
    await jobs.claim(limit=0)
    await jobs.claim_release.look_for_parked()
    assert PARKED.labels("ai.job.praised")._value.get() == 2
    await jobs.outbox_admin.discard("ops", ids)
    await jobs.claim_release.look_for_parked()
    assert PARKED.labels("ai.job.praised")._value.get() == 0
