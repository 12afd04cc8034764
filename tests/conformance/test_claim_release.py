"""OB-3, OB-5: what a dispatcher that is gone had claimed, and what no dispatcher can send."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text

from aijobs.errors import ClaimLost, Unavailable
from services.jobs.claim_release import PARKED
from services.jobs.outbox import Published, SettleRequest
from services.jobs.store import dispatchers as dispatcher_store
from services.jobs.store.database import Transaction
from services.jobs.store.tables import dispatchers, outbox_events
from tests.conformance.conftest import Jobs

SOON = timedelta(milliseconds=500)


@pytest.fixture
def quick(jobs: Jobs) -> Jobs:
    """An engine in which a dispatcher is gone after half a second."""
    return Jobs(jobs.database, dispatcher_grace=SOON)


async def silence(jobs: Jobs, dispatcher_id: str, seconds: int = 10) -> None:
    """Let time pass without a sign of life of a dispatcher."""

    async def work(tx: Transaction) -> None:
        past = f"seen_at - {seconds * 1_000_000}" if tx.sqlite else f"seen_at - INTERVAL {seconds} SECOND"
        await tx.execute(
            text(f"UPDATE dispatchers SET seen_at = {past} WHERE dispatcher_id = :id"), {"id": dispatcher_id}
        )

    await jobs.database.write(work)


async def look_for_a_grace(jobs: Jobs) -> None:
    """Look without a gap for a whole grace."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SOON.total_seconds() * 1.2
    while loop.time() < until:
        await jobs.claim_release.release_orphaned()
        await asyncio.sleep(0.05)


def has_looked_long(jobs: Jobs) -> None:
    """Have the loop look without a gap from long ago until long from now, however slow this machine is."""
    jobs.claim_release._looking_since = 0.0
    jobs.claim_release._looked_at = asyncio.get_running_loop().time() + 3600


async def test_a_silent_dispatchers_claims_end_and_those_of_others_do_not(jobs: Jobs) -> None:
    for _ in range(4):
        await jobs.create()
    has_looked_long(jobs)
    killed, healthy = uuid4().hex, uuid4().hex
    lost = await jobs.claim(killed, limit=2, dispatcher_id="killed")
    kept = await jobs.claim(healthy, limit=2, dispatcher_id="healthy")
    await silence(jobs, "killed")
    assert await jobs.claim_release.release_orphaned() == 2
    again = uuid4().hex
    assert [e.event_id for e in await jobs.claim(again, dispatcher_id="healthy")] == [e.event_id for e in lost]
    settled = await jobs.outbox.settle(healthy, [SettleRequest(event_id=kept[0].event_id, result=Published())])
    assert settled == [None]
    (late,) = await jobs.outbox.settle(killed, [SettleRequest(event_id=lost[0].event_id, result=Published())])
    assert isinstance(late, ClaimLost), "the silent one was alive after all: it publishes twice at worst"


async def test_a_released_claim_costs_no_attempt_and_wakes_others(jobs: Jobs) -> None:
    await jobs.create()
    await jobs.claim(dispatcher_id="killed")
    has_looked_long(jobs)
    await silence(jobs, "killed")
    waiting = asyncio.create_task(jobs.claim(dispatcher_id="healthy", wait=timedelta(seconds=20)))
    await asyncio.sleep(0)
    assert await jobs.claim_release.release_orphaned() == 1
    async with asyncio.timeout(5):
        assert len(await waiting) == 1
    (row,) = await jobs.rows(outbox_events)
    assert row["attempt_count"] == 0


async def test_a_claim_without_events_is_a_sign_of_life(jobs: Jobs) -> None:
    await jobs.create()
    await jobs.claim(dispatcher_id="busy")
    has_looked_long(jobs)
    await silence(jobs, "busy")
    assert await jobs.claim(dispatcher_id="busy", limit=0) == []
    assert await jobs.claim_release.release_orphaned() == 0


async def test_a_waiting_claim_goes_on_giving_signs_of_life(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.outbox.POLL_INTERVAL", timedelta(milliseconds=50))
    monkeypatch.setattr("services.jobs.outbox.SIGN_INTERVAL", timedelta(milliseconds=50))
    waiting = asyncio.create_task(jobs.claim(dispatcher_id="idle", wait=timedelta(seconds=20)))
    seen: set[object] = set()
    async with asyncio.timeout(10):
        while len(seen) < 3:
            seen |= {row["seen_at"] for row in await jobs.rows(dispatchers)}
            await asyncio.sleep(0.01)
    waiting.cancel()


async def test_after_a_gap_in_our_own_looking_everybody_gets_a_full_grace(quick: Jobs) -> None:
    """While the database was away nobody could give a sign."""
    await quick.create()
    await look_for_a_grace(quick)
    await quick.claim(dispatcher_id="healthy")
    await silence(quick, "healthy")
    # Nothing was looked at for longer than the grace: as if each look had found no database.
    await asyncio.sleep(SOON.total_seconds() * 1.5)
    assert await quick.claim_release.release_orphaned() == 0
    await quick.claim(dispatcher_id="healthy", limit=0)
    await look_for_a_grace(quick)
    (row,) = await quick.rows(outbox_events)
    assert row["status"] == "pending", "silent for another grace, it is gone"


async def test_a_look_that_the_database_did_not_answer_counts_as_a_gap(quick: Jobs, monkeypatch) -> None:
    await look_for_a_grace(quick)

    async def away(*_: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(quick.database, "write", away)
        broken.setattr(quick.database, "read", away)
        until = asyncio.get_running_loop().time() + SOON.total_seconds() * 1.5
        while asyncio.get_running_loop().time() < until:
            with pytest.raises(Unavailable):
                await quick.claim_release.release_orphaned()
            await asyncio.sleep(0.05)
    await quick.create()
    await quick.claim(dispatcher_id="healthy")
    await silence(quick, "healthy")
    assert await quick.claim_release.release_orphaned() == 0


async def test_events_of_an_unknown_type_are_parked_counted_and_in_nobodys_way(jobs: Jobs, capsys) -> None:
    await jobs.create()
    newer = outbox_events.insert().values(
        event_type="ai.job.paused",
        aggregate_type="AiJob",
        payload_json="{}",
        status="pending",
        attempt_count=0,
    )

    async def work(tx: Transaction) -> None:
        moment = (await jobs.rows(outbox_events))[0]["created_at"] - timedelta(hours=1)
        rows = [
            {"event_id": str(n), "aggregate_id": str(n), "dedupe_key": str(n), "rank_at": moment, "created_at": moment}
            for n in range(3)
        ]
        await tx.execute(newer, rows)

    await jobs.database.write(work)
    await jobs.claim_release.look_for_parked()
    assert len(await jobs.claim(limit=1)) == 1, "older events of another type come first for nobody"
    await jobs.claim_release.look_for_parked()
    await jobs.claim_release.look_for_parked()
    assert PARKED.labels("ai.job.paused")._value.get() == 3
    assert capsys.readouterr().out.count("no dispatcher can send") == 1, "told once, not every half minute"
    assert {row["status"] for row in await jobs.rows(outbox_events) if row["event_type"] == "ai.job.paused"} == {
        "pending"
    }
    assert [e.event_type for e in await jobs.claim(event_types=["ai.job.paused"])] == ["ai.job.paused"] * 3
    await jobs.claim_release.look_for_parked()
    assert PARKED.labels("ai.job.paused")._value.get() == 0


async def test_dispatchers_that_are_long_gone_are_forgotten(jobs: Jobs) -> None:
    await jobs.claim(dispatcher_id="old")
    await jobs.claim(dispatcher_id="new")
    await silence(jobs, "old", seconds=2 * 86400)
    await jobs.claim_release.forget()
    assert [row["dispatcher_id"] for row in await jobs.rows(dispatchers)] == ["new"]


async def test_a_look_that_the_database_let_wait_for_a_grace_judges_nobody(quick: Jobs, monkeypatch) -> None:
    """What let it wait let the dispatchers' signs of life wait as well."""
    await quick.create()
    await quick.claim(dispatcher_id="healthy")
    has_looked_long(quick)
    await silence(quick, "healthy")
    look = dispatcher_store.lock_unseen

    async def slow(tx: Transaction, unseen: timedelta) -> object:
        await asyncio.sleep(SOON.total_seconds() * 1.2)
        return await look(tx, unseen)

    monkeypatch.setattr("services.jobs.claim_release.dispatchers.lock_unseen", slow)
    assert await quick.claim_release.release_orphaned() == 0
