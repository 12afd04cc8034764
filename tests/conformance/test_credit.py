"""QU-3, ruling 23: the broker's queues stay shallow, since nothing can be overtaken there."""

import asyncio
from datetime import timedelta
from uuid import uuid4

from services.jobs.outbox import WITHHELD_WAIT, Published, SettleRequest
from services.jobs.quotas import Limits
from services.jobs.store import queues
from services.jobs.store.outbox import EventRow
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import Jobs, new_job

QUEUE = "ai-interactive"
LONG = timedelta(seconds=20)


async def shallow(jobs: Jobs, waiting: int, depth: int = 10) -> Jobs:
    """Return an engine whose queues hold at most `depth` messages, with waiting jobs."""
    engine = Jobs(jobs.database, limits=Limits(), queue_depth=depth)
    for start in range(0, waiting, 100):
        await engine.creation.create("backend", [new_job() for _ in range(min(100, waiting - start))])
    return engine


async def publish(jobs: Jobs, token: str, events: list[EventRow]) -> None:
    await jobs.outbox.settle(token, [SettleRequest(event_id=e.event_id, result=Published()) for e in events])


async def test_a_claim_gets_what_is_missing_to_the_limit(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    assert len(await engine.claim(limit=100, ready={QUEUE: 7})) == 3


async def test_what_others_have_claimed_counts(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    assert len(await engine.claim(limit=6)) == 6
    assert len(await engine.claim(limit=100)) == 4
    assert await engine.claim(limit=100) == []


async def test_what_was_published_after_the_dispatcher_looked_counts(jobs: Jobs) -> None:
    """Another dispatcher's messages are in the broker by the time that the waiting claim gets its events."""
    engine = await shallow(jobs, 0)
    waiting = asyncio.create_task(engine.claim(limit=100, ready={QUEUE: 0}, wait=LONG))
    await asyncio.sleep(0)
    await engine.operating.pause("ops", QUEUE, "")
    await engine.creation.create("backend", [new_job() for _ in range(30)])
    # Not seen by the waiting claim: the queue is paused. Published as by another dispatcher, behind its back.
    rows = await engine.rows(outbox_events, "id")
    settled = outbox_events.update().where(outbox_events.c.id.in_([row["id"] for row in rows[:8]]))
    now = (await engine.database.read(queues.every))[QUEUE].read_at
    await engine.database.write(lambda tx: tx.execute(settled.values(status="published", settled_at=now)))
    await engine.operating.resume("ops", QUEUE)
    async with asyncio.timeout(10):
        assert len(await waiting) == 2


async def test_dispatchers_that_claim_at_once_never_exceed_the_limit(jobs: Jobs) -> None:
    engine = await shallow(jobs, 100, depth=25)
    batches = await asyncio.gather(*(engine.claim(limit=10) for _ in range(8)))
    assert sum(map(len, batches)) == 25


async def test_a_claim_that_finds_the_queue_full_ends_soon_so_that_the_dispatcher_looks_again(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        assert await engine.claim(ready={QUEUE: 10}, wait=LONG) == []
    assert WITHHELD_WAIT.total_seconds() <= loop.time() - began < 5


async def test_a_full_queue_holds_up_no_other_event(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    first = (await engine.rows(outbox_events, "id"))[0]["aggregate_id"]
    await engine.cancel(first)
    assert [event.event_type for event in await engine.claim(ready={QUEUE: 10})] == ["ai.job.cancelled"]


async def test_while_a_queue_is_full_a_claim_still_hears_of_other_events(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.outbox.WITHHELD_WAIT", timedelta(seconds=8))
    engine = await shallow(jobs, 30)
    first = (await engine.rows(outbox_events, "id"))[0]["aggregate_id"]
    claiming = asyncio.create_task(engine.claim(ready={QUEUE: 10}, wait=LONG))
    await asyncio.sleep(0)
    await engine.cancel(first)
    async with asyncio.timeout(6):
        assert [event.event_type for event in await claiming] == ["ai.job.cancelled"]


async def test_a_paused_queue_does_not_make_claims_end_early(jobs: Jobs) -> None:
    engine = await shallow(jobs, 5)
    await engine.operating.pause("ops", QUEUE, "")
    claiming = asyncio.create_task(engine.claim(wait=LONG))
    done, _ = await asyncio.wait({claiming}, timeout=WITHHELD_WAIT.total_seconds() * 5)
    assert not done
    claiming.cancel()


async def test_a_queue_is_filled_again_as_it_empties(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    ready, seen = 0, 0
    while seen < 30:
        token = uuid4().hex
        events = await engine.claim(token, limit=100, ready={QUEUE: ready})
        await publish(engine, token, events)
        ready += len(events)
        seen += len(events)
        assert ready <= 10
        ready -= 3


async def test_depths_are_kept_for_the_sweep_but_not_more_than_once_a_second(jobs: Jobs) -> None:
    await jobs.claim(limit=0, ready={QUEUE: 4})
    await jobs.claim(limit=0, ready={QUEUE: 5})
    row = (await jobs.database.read(queues.every))[QUEUE]
    assert (row.ready, row.ready_before) == (4, None)


async def test_two_reports_a_second_apart_are_both_kept(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.store.queues.REPORT_INTERVAL", timedelta(0))
    for ready in (4, 5, 6):
        await jobs.claim(limit=0, ready={QUEUE: ready})
    row = (await jobs.database.read(queues.every))[QUEUE]
    assert (row.ready, row.ready_before) == (6, 5)
    assert row.ready_at is not None
    assert row.ready_before_at is not None
    assert row.ready_at > row.ready_before_at


async def test_a_dispatcher_that_sends_only_dispatches_finds_every_queue_full(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    claim = engine.claim(ready={QUEUE: 10, "ai-background": 10}, event_types=["ai.job.enqueue"], wait=LONG)
    async with asyncio.timeout(10):
        assert await claim == []


async def test_what_was_published_before_the_clock_was_set_back_does_not_stop_the_flow(jobs: Jobs) -> None:
    engine = await shallow(jobs, 30)
    token = uuid4().hex
    await publish(engine, token, await engine.claim(token, limit=10))
    later = (await engine.database.read(queues.every))[QUEUE].read_at
    assert later is not None
    settled = outbox_events.update().where(outbox_events.c.status == "published")
    moved = settled.values(settled_at=later + timedelta(minutes=10))
    await engine.database.write(lambda tx: tx.execute(moved))
    assert len(await engine.claim(limit=100)) == 10


async def test_a_claim_that_asks_for_events_stores_its_depths_too(jobs: Jobs) -> None:
    await jobs.claim(limit=5, ready={QUEUE: 4})
    assert (await jobs.database.read(queues.every))[QUEUE].ready == 4
