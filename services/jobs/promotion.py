"""The promoter: scheduled events become pending when they are due, and jobs get their rank then (QU-3, ruling 23).

A claim never looks at scheduled events, so a hundred thousand delayed jobs slow no claim down. The promoter sleeps
until the next one is due, at most a second, since other replicas schedule events too. It may run on every replica at
once: whoever locks the user's row first promotes, the other one finds nothing left.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

import structlog

from aijobs.errors import AijobsError, Unavailable
from services.jobs import events
from services.jobs.batches import write_each
from services.jobs.ranking import QueueOrder, line_of
from services.jobs.store import jobs as job_store
from services.jobs.store import ranks, scheduled_events, users
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.scheduled_events import ScheduledEvent
from services.jobs.wakeups import Wakeups

#: Events in one transaction.
CHUNK = 100
#: How long the promoter sleeps at most.
LONGEST_SLEEP = timedelta(seconds=1)
#: How long it sleeps at least, so that a clock that stands still does not make it spin.
SHORTEST_SLEEP = timedelta(milliseconds=1)
log = structlog.get_logger()


class Promotion:
    """Makes due events pending; `run` is the promoter."""

    name = "promoter"

    def __init__(self, database: Database, wakeups: Wakeups, order: QueueOrder) -> None:
        self._database = database
        self._wakeups = wakeups
        self._order = order

    async def run(self) -> None:
        """Promote until cancelled. Never ends by a fault of the database."""
        while True:
            pause = LONGEST_SLEEP
            try:
                _, left = await self._promote_all()
                until = await self._database.read(scheduled_events.until_due)
                if until is not None and not left:
                    pause = max(min(until, LONGEST_SLEEP), SHORTEST_SLEEP)
            except Unavailable:
                log.warning("due events not promoted: the database cannot be reached")
            await asyncio.sleep(pause.total_seconds())

    async def promote(self) -> int:
        """Promote every event that is due, and return how many.

        Raises:
            Unavailable: the database cannot be reached.

        """
        promoted, _ = await self._promote_all()
        return promoted

    async def _promote_all(self) -> tuple[int, int]:
        """Return how many events were promoted or dropped, and how many could not be."""
        total, passed_over = 0, 0
        while True:
            look = partial(scheduled_events.due, limit=CHUNK, passed_over=passed_over)
            due = await self._database.read(look)
            results = await write_each(self._database, due, self._promote)
            promoted = sum(result is True for result in results)
            total += promoted
            # What cannot be written, whatever the reason, stays in front, and is in nobody's way.
            passed_over += len(due) - promoted
            if len(due) < CHUNK:
                return total, passed_over

    async def _promote(self, tx: Transaction, due: Sequence[ScheduledEvent]) -> list[bool | AijobsError]:
        present = await job_store.get(tx, {event.aggregate_id for event in due})
        await users.lock(tx, {job.user_id for job in present.values() if job.rank_at is None})
        rows = await job_store.get(tx, present, lock=True)
        scheduled = await scheduled_events.lock_due(tx, [event.id for event in due])
        wanted = [event for event in scheduled if events.leads_anywhere(event.dedupe_key, rows.get(event.aggregate_id))]
        given = await self._rank(tx, [rows[event.aggregate_id] for event in wanted if event.rank_at is None])
        places = {event.id: event.rank_at or given[event.aggregate_id] for event in wanted}
        await scheduled_events.promote(tx, places)
        await scheduled_events.drop(tx, [event.id for event in scheduled if event.id not in places])
        if places:
            tx.after_commit(self._wakeups.events.give)
        return [True] * len(due)

    async def _rank(self, tx: Transaction, due: Sequence[JobRow]) -> dict[str, datetime]:
        """Return ranks by job id; jobs that never had one get theirs, in the order in which they became due."""
        ranked = {job.job_id: job.rank_at for job in due if job.rank_at is not None}
        new = sorted(
            (job for job in due if job.rank_at is None), key=lambda job: (job.due_at or job.created_at, job.job_id)
        )
        if not new:
            return ranked
        ranking = await self._order.open(tx, map(line_of, new))
        given = {job.job_id: ranking.rank(line_of(job)) for job in new}
        await ranking.write(tx)
        await ranks.give(tx, given)
        return ranked | given
