"""OB-1, OB-2, OB-3, OB-5, OB-6: who publishes what, woken by what, and what a lost claim costs."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from aijobs.errors import ClaimLost
from services.jobs.outbox import Published, PublishFailed, Released, SettleRequest
from services.jobs.ranking import QueueOrder, Ranking
from services.jobs.store.database import Transaction
from services.jobs.store.ranks import Line
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import QUANTUM, Jobs, ObservedSignal, new_job

LONG = timedelta(seconds=20)


async def make_due(jobs: Jobs) -> None:
    """Let backoffs pass, as time would."""

    async def work(tx) -> None:
        await tx.execute(text("UPDATE outbox_events SET available_at = created_at WHERE available_at IS NOT NULL"))

    await jobs.database.write(work)
    await jobs.promotion.promote()


async def end_claims(jobs: Jobs) -> None:
    """Let claims run out, as time would."""

    async def work(tx) -> None:
        await tx.execute(text("UPDATE outbox_events SET claim_until = created_at WHERE claim_until IS NOT NULL"))

    await jobs.database.write(work)


async def test_events_are_claimed_in_order_and_only_once(jobs: Jobs) -> None:
    ids = [(await jobs.create()).job.job_id for _ in range(5)]
    first, second = await jobs.claim(limit=3), await jobs.claim(limit=3)
    assert [event.aggregate_id for event in [*first, *second]] == ids
    assert await jobs.claim() == []


async def test_concurrent_claims_share_without_doubles(jobs: Jobs) -> None:
    ids = {(await jobs.create()).job.job_id for _ in range(30)}
    batches = await asyncio.gather(*(jobs.claim(limit=5) for _ in range(8)))
    claimed = [event.aggregate_id for batch in batches for event in batch]
    for _ in range(10):  # SKIP LOCKED may have skipped rows that another claim was only looking at
        claimed += [event.aggregate_id for event in await jobs.claim(limit=5)]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) == ids


async def test_a_repeated_claim_gets_the_same_events(jobs: Jobs) -> None:
    """Case L7: the answer was lost after its commit."""
    for _ in range(3):
        await jobs.create()
    token = uuid4().hex
    first = await jobs.claim(token, limit=2)
    assert await jobs.claim(token, limit=2) == first


async def test_a_repeated_claim_begins_anew(jobs: Jobs) -> None:
    """Its answer promises the whole claim time, so it must have it: else two dispatchers publish while healthy."""
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    await end_claims(jobs)
    assert await jobs.claim(token) == [event]
    assert await jobs.claim_release.release_expired() == 0


async def test_a_waiting_claim_is_woken_by_the_commit(jobs: Jobs, monkeypatch) -> None:
    """OB-6. The fallback poll is out of play."""
    monkeypatch.setattr("services.jobs.outbox.POLL_INTERVAL", LONG)
    jobs.wakeups.events = signal = ObservedSignal()
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(jobs.claim(wait=LONG))
        await signal.awaited.wait()
        created = await jobs.create()
        (event,) = await waiting
    assert event.aggregate_id == created.job.job_id


async def test_a_claim_without_events_ends_after_its_wait(jobs: Jobs) -> None:
    assert await jobs.claim(wait=timedelta(milliseconds=30)) == []


async def test_types_that_the_dispatcher_does_not_name_stay(jobs: Jobs) -> None:
    await jobs.create()
    assert await jobs.claim(event_types=["ai.job.completed"]) == []
    assert len(await jobs.claim()) == 1


async def test_a_published_event_is_done(jobs: Jobs) -> None:
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    published = [SettleRequest(event_id=event.event_id, result=Published())]
    assert await jobs.outbox.settle(token, published) == [None]
    assert await jobs.outbox.settle(token, published) == [None], "a repeat gets the same answer"
    (row,) = await jobs.rows(outbox_events, "id")
    assert (row["status"], row["attempt_count"]) == ("published", 0)
    assert row["settled_at"] is not None


async def test_a_settle_without_the_claim_is_refused(jobs: Jobs) -> None:
    """Case B4: a thawed dispatcher settles after another one has taken over."""
    await jobs.create()
    frozen, other = uuid4().hex, uuid4().hex
    (event,) = await jobs.claim(frozen)
    await end_claims(jobs)
    releasing = asyncio.create_task(jobs.claim_release.run())
    (again,) = await jobs.claim(other, wait=LONG)
    releasing.cancel()
    assert again.event_id == event.event_id
    (refusal,) = await jobs.outbox.settle(frozen, [SettleRequest(event_id=event.event_id, result=Published())])
    assert isinstance(refusal, ClaimLost)
    (unknown,) = await jobs.outbox.settle(other, [SettleRequest(event_id=str(uuid4()), result=Published())])
    assert isinstance(unknown, ClaimLost)
    (row,) = await jobs.rows(outbox_events, "id")
    assert (row["status"], row["attempt_count"]) == ("processing", 0)


async def test_only_an_events_own_faults_use_up_its_attempts(jobs: Jobs) -> None:
    await jobs.create()
    for _ in range(5):
        token = uuid4().hex
        (event,) = await jobs.claim(token)
        await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=Released())])
        assert await jobs.claim() == [], "given back, it waits a moment: no hot loop"
        await make_due(jobs)
    statuses = []
    for _ in range(3):
        token = uuid4().hex
        (event,) = await jobs.claim(token)
        failed = PublishFailed(reason="DISPATCH_REFUSED", retryable=True)
        await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=failed)])
        (row,) = await jobs.rows(outbox_events, "id")
        statuses.append((row["status"], row["attempt_count"]))
        assert await jobs.claim() == [], "it waits before its next attempt"
        await make_due(jobs)
    assert statuses == [("scheduled", 1), ("scheduled", 2), ("dead", 3)]
    assert await jobs.claim() == []


async def test_all_expired_claims_are_released_at_once(jobs: Jobs) -> None:
    """More than one small transaction takes: 250 claimed events of a dispatcher that is gone."""
    for start in range(0, 250, 50):
        batch = [new_job(user_id=f"user-{number}") for number in range(start, start + 50)]
        await jobs.creation.create("backend", batch)
    assert len(await jobs.claim(limit=250)) == 250
    await end_claims(jobs)
    assert await jobs.claim_release.release_expired() == 250
    assert len(await jobs.claim(limit=250)) == 250


async def test_a_hopeless_event_is_dead_at_once(jobs: Jobs) -> None:
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    failed = PublishFailed(reason="DISPATCH_UNUSABLE_EVENT", retryable=False)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=failed)])
    (row,) = await jobs.rows(outbox_events, "id")
    assert (row["status"], row["last_error"]) == ("dead", "DISPATCH_UNUSABLE_EVENT")


async def test_a_batch_settles_each_event_by_itself(jobs: Jobs) -> None:
    for _ in range(3):
        await jobs.create()
    token = uuid4().hex
    claimed = await jobs.claim(token)
    results = await jobs.outbox.settle(
        token,
        [
            SettleRequest(event_id=claimed[0].event_id, result=Published()),
            SettleRequest(
                event_id=claimed[1].event_id, result=PublishFailed(reason="DISPATCH_REFUSED", retryable=True)
            ),
            SettleRequest(event_id=claimed[2].event_id, result=Released()),
            SettleRequest(event_id=str(uuid4()), result=Released()),
        ],
    )
    assert [result is None for result in results] == [True, True, True, False]
    assert [row["status"] for row in await jobs.rows(outbox_events, "id")] == ["published", "scheduled", "scheduled"]


async def test_a_late_copy_of_a_claim_takes_no_event_that_was_settled_under_its_token(jobs: Jobs) -> None:
    """Its answer goes to nobody, and a repeated settle would count the failure once more."""
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=Released())])
    await make_due(jobs)
    assert await jobs.claim(token) == []
    assert [other.event_id for other in await jobs.claim()] == [event.event_id]


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
async def test_an_event_whose_transaction_commits_last_is_not_passed_by(jobs: Jobs, monkeypatch) -> None:
    """Case B1: it has the lower number and the lower rank, and commits after a later one was published.

    On SQLite there is no such case: it has one writer at a time.
    """
    monkeypatch.setattr("services.jobs.outbox.POLL_INTERVAL", LONG)
    begun, may_commit = asyncio.Event(), asyncio.Event()

    class Slow(QueueOrder):
        async def open(self, tx: Transaction, lines: Iterable[Line]) -> Ranking:
            ranking = await super().open(tx, lines)
            tx.execute = slowly(tx.execute)
            return ranking

    def slowly(execute: Any) -> Any:
        async def run(statement: Any, *arguments: Any) -> Any:
            result = await execute(statement, *arguments)
            if getattr(statement, "table", None) is outbox_events:
                begun.set()
                await may_commit.wait()
            return result

        return run

    late = Jobs(jobs.database, wakeups=jobs.wakeups, order=Slow(QUANTUM))
    creating = asyncio.create_task(late.create(user_id="slow-user"))
    await begun.wait()
    quick = await jobs.create(user_id="quick-user")
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    assert event.aggregate_id == quick.job.job_id
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=Published())])
    waiting = asyncio.create_task(jobs.claim(wait=LONG))
    await asyncio.sleep(0)
    may_commit.set()
    slow = await creating
    async with asyncio.timeout(10):
        assert [event.aggregate_id for event in await waiting] == [slow.job.job_id]
    first, second = await jobs.rows(outbox_events, "id")
    assert (first["aggregate_id"], second["aggregate_id"]) == (slow.job.job_id, quick.job.job_id)
