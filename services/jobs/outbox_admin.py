"""What operators do with outbox events: requeue dead ones, give up others (OB-3, OB-5, ruling 21).

A dead event that tells of an end is always worth another try. One that dispatches a job is so only while the job waits
under its very number; else it leads nowhere and is given up instead. And just such an event cannot be discarded: its
job would wait for ever.

What was read is judged again on locked rows, jobs before events, so all of this is safe while everything runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

import structlog

from aijobs.errors import (
    AijobsError,
    EventClaimed,
    EventNeeded,
    EventNotDead,
    EventNotDiscardable,
    EventNotFound,
)
from services.jobs import events
from services.jobs.batches import write_each
from services.jobs.events import EventType
from services.jobs.store import jobs as job_store
from services.jobs.store import outbox_admin as store
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.outbox import EventStatus
from services.jobs.store.outbox_admin import EventDetail, EventFilter
from services.jobs.wakeups import Wakeups

#: Events in one transaction.
CHUNK = 100
#: Dead events that one requeue by filter goes through, at most.
MOST_REQUEUED = 1000
log = structlog.get_logger()


class Outcome(StrEnum):
    """What became of an event."""

    REQUEUED = "requeued"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventResult:
    """What became of one event, or why it stays as it is. `job_id` is empty if the event is not known."""

    event_id: str
    job_id: str
    result: Outcome | AijobsError


#: Says what is to become of an event, given the job that it dispatches.
Judge: TypeAlias = Callable[[EventDetail, JobRow | None], Outcome | AijobsError]


class OutboxAdmin:
    """Serves operators.

    Args:
        database: where the events are.
        wakeups: who is told that there are events again.

    """

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups

    async def requeue(self, caller: str, event_ids: Sequence[str], *, dry_run: bool = False) -> list[EventResult]:
        """Make dead events pending; those that lead nowhere any more are discarded. Answers in the order of the ids.

        Raises:
            Unavailable: the database cannot be reached.

        """
        results = await self._each(event_ids, _requeued, dry_run=dry_run)
        if not dry_run:
            _log(caller, results)
        return results

    async def requeue_dead(
        self, caller: str, wanted: EventFilter, *, dry_run: bool = False
    ) -> tuple[list[EventResult], bool]:
        """Requeue dead events that fit a filter, the oldest ones first; also tells whether there are more.

        Raises:
            Unavailable: the database cannot be reached.

        """
        results: list[EventResult] = []
        after = 0
        # Behind the last one: what dies again meanwhile is not met again.
        while len(results) < MOST_REQUEUED:
            found = await self._database.read(partial(store.dead, wanted=wanted, after=after, limit=CHUNK))
            results += await self.requeue(caller, [event.event_id for event in found], dry_run=dry_run)
            if len(found) < CHUNK:
                return results, False
            after = found[-1].id
        return results, bool(await self._database.read(partial(store.dead, wanted=wanted, after=after, limit=1)))

    async def discard(self, caller: str, event_ids: Sequence[str]) -> list[EventResult]:
        """Give up events that are not published yet. Answers in the order of the ids.

        Raises:
            Unavailable: the database cannot be reached.

        """
        results = await self._each(event_ids, _discarded)
        _log(caller, results)
        return results

    async def _each(self, event_ids: Sequence[str], judge: Judge, *, dry_run: bool = False) -> list[EventResult]:
        work = partial(self._settle, judge=judge, dry_run=dry_run)
        found: list[EventResult | AijobsError] = []
        for start in range(0, len(event_ids), CHUNK):
            ids = event_ids[start : start + CHUNK]
            if dry_run:
                found += await self._database.read(partial(work, event_ids=ids))
            else:
                found += await write_each(self._database, ids, work)
        return [
            EventResult(event_id=event_id, job_id="", result=result) if isinstance(result, AijobsError) else result
            for event_id, result in zip(event_ids, found, strict=True)
        ]

    async def _settle(
        self, tx: Transaction, event_ids: Sequence[str], *, judge: Judge, dry_run: bool
    ) -> list[EventResult | AijobsError]:
        present, jobs = await _read(tx, event_ids, lock=not dry_run)
        results: dict[str, EventResult | AijobsError] = {
            event.event_id: EventResult(
                event_id=event.event_id,
                job_id=event.aggregate_id,
                result=judge(event, jobs.get(event.aggregate_id)),
            )
            for event in present.values()
        }
        if not dry_run:
            await self._write(tx, present, [result for result in results.values() if isinstance(result, EventResult)])
        return [results.get(event_id) or EventNotFound(event_id) for event_id in event_ids]

    async def _write(self, tx: Transaction, present: Mapping[str, EventDetail], results: Sequence[EventResult]) -> None:
        ids: dict[Outcome, list[int]] = {
            outcome: [present[each.event_id].id for each in results if each.result is outcome] for outcome in Outcome
        }
        await store.requeue(tx, ids[Outcome.REQUEUED])
        await store.discard(tx, ids[Outcome.DISCARDED])
        if ids[Outcome.REQUEUED]:
            tx.after_commit(self._wakeups.events.give)


async def _read(
    tx: Transaction, event_ids: Sequence[str], *, lock: bool
) -> tuple[Mapping[str, EventDetail], Mapping[str, JobRow]]:
    """Read events by id, and the jobs that they dispatch; with `lock`, hold first the jobs, then the events."""
    seen = await store.find(tx, event_ids)
    dispatched = {event.aggregate_id for event in seen.values() if event.event_type == EventType.ENQUEUE}
    jobs = await job_store.get(tx, dispatched, lock=lock) if dispatched else {}
    return (await store.lock(tx, [event.id for event in seen.values()]) if lock and seen else seen), jobs


def _requeued(event: EventDetail, job: JobRow | None) -> Outcome | AijobsError:
    if event.status != EventStatus.DEAD:
        return EventNotDead(f"event {event.event_id} is {event.status}")
    return Outcome.REQUEUED if events.leads_anywhere(event.dedupe_key, job) else Outcome.DISCARDED


def _discarded(event: EventDetail, job: JobRow | None) -> Outcome | AijobsError:
    match event.status:
        case EventStatus.PROCESSING:
            return EventClaimed(f"event {event.event_id} was claimed just now, by dispatcher {event.locked_by}")
        case EventStatus.PUBLISHED:
            return EventNotDiscardable(f"event {event.event_id} is published")
    if event.event_type == EventType.ENQUEUE and events.leads_anywhere(event.dedupe_key, job):
        return EventNeeded(f"job {event.aggregate_id} waits for event {event.event_id}")
    return Outcome.DISCARDED


def _log(caller: str, results: Sequence[EventResult]) -> None:
    for outcome in Outcome:
        ids = [result.event_id for result in results if result.result is outcome]
        if ids:
            log.warning("events settled by an operator", outcome=outcome, events=len(ids), first=ids[0], caller=caller)
