"""QU-3, ruling 23: urgent jobs first, users in turn, nobody waits for ever; and what is not due is in nobody's way."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from sqlalchemy import delete, func, select, text

from aijobs.errors import AijobsError, JobNotReady
from services.jobs.creation import Created
from services.jobs.execution import Released
from services.jobs.promotion import Promotion
from services.jobs.quotas import Limits
from services.jobs.ranking import PRIORITY_STEP
from services.jobs.retrying import Retry
from services.jobs.store.database import Database, Transaction
from services.jobs.store.scheduled_events import ScheduledEvent
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.tables import outbox_events, virtual_times
from tests.conformance.conftest import QUANTUM, Jobs, new_job

#: Messages that the broker holds; a job that is created now cannot overtake them.
IN_BROKER = 50


async def backlog(jobs: Jobs, count: int, **changes: object) -> list[str]:
    """Create jobs of one user, a hundred at a time."""
    ids: list[str] = []
    for start in range(0, count, 100):
        batch = [new_job(**changes) for _ in range(min(100, count - start))]
        for created in await jobs.creation.create("backend", batch):
            assert isinstance(created, Created), created
            ids.append(created.job.job_id)
    return ids


async def order(jobs: Jobs, count: int) -> list[str]:
    """Return the jobs in the order in which claims give them out."""
    claimed: list[str] = []
    while len(claimed) < count:
        events = await jobs.claim(limit=min(100, count - len(claimed)))
        assert events, "fewer events than jobs"
        claimed += [event.aggregate_id for event in events]
    return claimed


def unlimited(jobs: Jobs) -> Jobs:
    return Jobs(jobs.database, limits=Limits())


async def pass_time(jobs: Jobs, span: timedelta) -> None:
    """Set everything back that the order depends on, as if time had passed."""

    async def work(tx: Transaction) -> None:
        for table, columns in (
            ("outbox_events", ("rank_at", "available_at", "created_at")),
            ("jobs", ("rank_at", "due_at", "run_at", "created_at")),
            ("virtual_times", ("virtual_at",)),
        ):
            for column in columns:
                past = (
                    f"{column} - {span // timedelta(microseconds=1)}"
                    if tx.sqlite
                    else f"{column} - INTERVAL {span // timedelta(seconds=1)} SECOND"
                )
                await tx.execute(text(f"UPDATE {table} SET {column} = {past} WHERE {column} IS NOT NULL"))

    await jobs.database.write(work)


async def ranks(jobs: Jobs, ids: Sequence[str]) -> list[datetime]:
    rows = {row["job_id"]: row["rank_at"] for row in await jobs.rows(jobs_table)}
    return [rows[job_id] for job_id in ids]


async def test_another_users_job_starts_right_behind_what_is_in_the_broker(jobs: Jobs) -> None:
    """The stated bound: as many of the busy user's jobs come first as quanta have passed since their first one."""
    engine = unlimited(jobs)
    busy = await backlog(engine, 1000, user_id="busy")
    in_broker = await order(engine, IN_BROKER)
    (other,) = await backlog(engine, 1, user_id="other")
    begun, joined = await ranks(engine, [busy[0], other])
    ahead = max((joined - begun) // QUANTUM + 1 - IN_BROKER, 0)
    assert ahead < 500, "the creates took no minute"
    following = await order(engine, ahead + 1)
    assert following == [*busy[IN_BROKER : IN_BROKER + ahead], other]
    assert in_broker == busy[:IN_BROKER]


async def test_an_urgent_job_of_the_same_user_starts_right_behind_what_is_in_the_broker(jobs: Jobs) -> None:
    engine = unlimited(jobs)
    await backlog(engine, 500, user_id="busy", priority=50)
    await order(engine, IN_BROKER)
    (urgent,) = await backlog(engine, 1, user_id="busy", priority=0)
    assert (await order(engine, 1)) == [urgent]


async def test_a_job_that_has_waited_longer_than_the_priority_gap_comes_before_an_urgent_one(jobs: Jobs) -> None:
    """Nothing starves: priority is a head start of ten seconds a step."""
    (old,) = await backlog(jobs, 1, user_id="patient", priority=60)
    await pass_time(jobs, 60 * PRIORITY_STEP + timedelta(seconds=5))
    (urgent,) = await backlog(jobs, 1, user_id="urgent", priority=0)
    assert await order(jobs, 2) == [old, urgent]


async def test_users_take_turns(jobs: Jobs) -> None:
    engine = unlimited(jobs)
    first = await backlog(engine, 100, user_id="first")
    second = await backlog(engine, 100, user_id="second")
    claimed = await order(engine, 200)
    for start in range(20, 180, 20):
        window = claimed[start : start + 20]
        assert 5 <= len(set(window) & set(first)) <= 15
        assert 5 <= len(set(window) & set(second)) <= 15
    assert [job_id for job_id in claimed if job_id in set(first)] == first, "a user's own jobs keep their order"


async def test_places_are_a_quantum_apart_also_when_creates_come_at_once(jobs: Jobs) -> None:
    batches = await asyncio.gather(*(backlog(jobs, 5) for _ in range(6)))
    moments = sorted(await ranks(jobs, [job_id for batch in batches for job_id in batch]))
    gaps = {later - earlier for earlier, later in pairwise(moments)}
    assert min(gaps) >= QUANTUM


async def test_lines_of_other_queues_and_priorities_do_not_wait_for_each_other(jobs: Jobs) -> None:
    await backlog(jobs, 50, priority=10)
    (other,) = await backlog(jobs, 1, priority=11)
    (rank,) = await ranks(jobs, [other])
    assert rank - datetime.now(UTC) < 11 * PRIORITY_STEP + timedelta(seconds=2)


async def test_a_takeover_and_a_hand_back_keep_their_place(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.claim()
    later = await backlog(jobs, 5)
    await jobs.submit(lease, Released(reason="shutting down"))
    assert await order(jobs, 6) == [lease.job_id, *later]
    rows = await jobs.rows(outbox_events, "id")
    assert rows[0]["rank_at"] == rows[-1]["rank_at"]


async def test_a_delayed_job_gets_its_place_when_it_is_due(jobs: Jobs) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    delayed = await backlog(jobs, 3, run_at=due)
    assert await ranks(jobs, delayed) == [None] * 3
    assert await jobs.promotion.promote() == 0
    await pass_time(jobs, timedelta(hours=2))
    now_created = await backlog(jobs, 1)
    assert await jobs.promotion.promote() == 3
    assert await order(jobs, 4) == [*now_created, *delayed], "due longer ago than created, but placed when it was seen"
    moments = await ranks(jobs, delayed)
    assert [later - earlier for earlier, later in pairwise(moments)] == [QUANTUM] * 2


async def test_promoters_on_every_replica_at_once_promote_each_event_once(jobs: Jobs) -> None:
    engine = unlimited(jobs)
    due = datetime.now(UTC) + timedelta(hours=1)
    delayed = await backlog(engine, 250, run_at=due)
    await pass_time(engine, timedelta(hours=2))
    replicas = [Promotion(engine.database, engine.wakeups, engine.order) for _ in range(4)]
    await asyncio.gather(*(replica.promote() for replica in replicas))
    claimed = await order(engine, 250)
    assert claimed == delayed
    assert await jobs.claim() == []


async def test_the_promoter_wakes_by_itself_when_the_next_event_is_due(jobs: Jobs) -> None:
    promoting = asyncio.create_task(jobs.promotion.run())
    created = await jobs.create(run_at=datetime.now(UTC) + timedelta(milliseconds=300))
    async with asyncio.timeout(5):
        (event,) = await jobs.claim(wait=timedelta(seconds=20))
    promoting.cancel()
    assert event.aggregate_id == created.job.job_id
    assert event.created_at < datetime.now(UTC)


async def test_the_promoter_goes_on_after_the_database_was_away(jobs: Jobs, monkeypatch) -> None:
    broken = Promotion(Database("mysql+aiomysql://nobody@127.0.0.1:1/none"), jobs.wakeups, jobs.order)
    assert len(await pauses_of(broken, monkeypatch)) == 3


async def test_a_delayed_job_that_was_cancelled_is_never_sent(jobs: Jobs) -> None:
    created = await jobs.create(run_at=datetime.now(UTC) + timedelta(hours=1))
    await jobs.cancel(created.job.job_id)
    await pass_time(jobs, timedelta(hours=2))
    await jobs.promotion.promote()
    statuses = {row["event_type"]: row["status"] for row in await jobs.rows(outbox_events)}
    assert statuses == {"ai.job.enqueue": "discarded", "ai.job.cancelled": "pending"}


async def test_only_the_present_dispatch_of_a_delayed_job_is_sent(jobs: Jobs) -> None:
    created = await jobs.create(run_at=datetime.now(UTC) + timedelta(hours=1))
    assert isinstance(await jobs.try_lock(created.job.job_id), JobNotReady)
    await pass_time(jobs, timedelta(hours=2))
    await jobs.promotion.promote()
    assert [row["status"] for row in await jobs.rows(outbox_events, "id")] == ["discarded", "pending"]


async def test_an_event_that_cannot_be_promoted_is_in_nobodys_way(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.promotion.CHUNK", 2)
    due = datetime.now(UTC) + timedelta(hours=1)
    delayed = await backlog(jobs, 5, run_at=due)
    await pass_time(jobs, timedelta(hours=2))

    genuine = Promotion._promote

    async def refuse(self: Promotion, tx: Transaction, due: Sequence[ScheduledEvent]) -> list[bool | AijobsError]:
        if any(event.aggregate_id in delayed[:2] for event in due):
            await tx.execute(text("INSERT INTO users (user_id, created_at) VALUES (NULL, NULL)"))
        return await genuine(self, tx, due)

    monkeypatch.setattr(Promotion, "_promote", refuse)
    assert await jobs.promotion.promote() == 3
    assert await order(jobs, 3) == delayed[2:]
    pauses = await pauses_of(jobs.promotion, monkeypatch)
    assert min(pauses) >= 1, "what cannot be promoted does not make the promoter spin"


async def pauses_of(promotion: Promotion, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run the promoter for three rounds and return how long it slept after each."""
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            enough.set()
            await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr("services.jobs.promotion.asyncio.sleep", sleep)
        running = asyncio.create_task(promotion.run())
        async with asyncio.timeout(30):
            await enough.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return pauses


async def test_virtual_times_of_the_past_are_forgotten_and_those_of_now_are_not(jobs: Jobs) -> None:
    await backlog(jobs, 1, user_id="old")
    await pass_time(jobs, timedelta(hours=2))
    await backlog(jobs, 1, user_id="new")
    await jobs.claim_release.forget()
    assert [row["user_id"] for row in await jobs.rows(virtual_times)] == ["new"]


async def test_a_manual_retry_stands_in_line_like_a_create(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await jobs.cancel(job_id)
    waiting = await backlog(jobs, 3)
    retried = await jobs.retrying.retry("ops", Retry(request_id="r", job_id=job_id, reason=""))
    moments = await ranks(jobs, [*waiting, retried.job_id])
    assert moments == sorted(moments)
    await jobs.database.write(
        lambda tx: tx.execute(delete(outbox_events).where(outbox_events.c.aggregate_id == job_id))
    )
    assert await order(jobs, 4) == [*waiting, retried.job_id]


async def test_many_delayed_jobs_slow_no_claim_down(jobs: Jobs) -> None:
    """A claim reads its first events by index and never meets a scheduled one; test_scale holds the plans."""
    await backlog(unlimited(jobs), 300, run_at=datetime.now(UTC) + timedelta(hours=1))
    (now_due,) = await backlog(unlimited(jobs), 1)
    assert await order(jobs, 1) == [now_due]
    scheduled = select(func.count()).where(outbox_events.c.status == "scheduled")
    assert (await jobs.database.read(lambda tx: tx.execute(scheduled))).scalar() == 300
