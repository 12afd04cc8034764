"""The sweep: no job waits for ever, whatever became of its message (LC-13).

A job that waits for a lock has an enqueue event under its present dispatch number. Once that is published, the job's
message is in the broker or in the hands of an executor, unless it was lost. It is taken for lost when both hold:

- An executor of its queue has had a free slot, without a break, for longer than any message takes to arrive: a message
  that exists would have been given to it.
- The broker's queue held, in two reports of dispatchers, fewer messages than there are such jobs.

Then the job is dispatched again under its next number; if the message turns up all the same, the lock decides. The
job's row is judged, not its events: they may be gone, and then that is what was lost.

What was read is judged again on the locked row before it is written, so the sweep may run on every replica at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import structlog

from aijobs import metrics
from aijobs.errors import AijobsError, Unavailable
from services.jobs import events, lifecycle, transitions
from services.jobs.batches import write_each
from services.jobs.store import executors, outbox, queues
from services.jobs.store import jobs as job_store
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.outbox import Dispatch, EventStatus
from services.jobs.store.queues import QueueRow
from services.jobs.wakeups import Wakeups

#: Jobs in one transaction.
CHUNK = 100
#: Older reports of executors say nothing about now.
FRESH_REPORT = timedelta(seconds=15)
#: So do older reports of dispatchers about the broker's queues.
FRESH_DEPTH = timedelta(minutes=1)
#: On its way without our help: the outbox sends it, or releases the claim of a dispatcher that is gone.
ON_ITS_WAY = (EventStatus.SCHEDULED, EventStatus.PENDING, EventStatus.PROCESSING)
DISPATCHED_AGAIN = metrics.counter("messages_lost", "Jobs that were dispatched again because their message was lost")
#: How an operator sees the dead events that jobs wait for, and has them published after all.
HELP = {
    "see": f"aijobs outbox list --status dead --type {events.EventType.ENQUEUE}",
    "then": f"aijobs outbox requeue --type {events.EventType.ENQUEUE}",
}
log = structlog.get_logger()


class Reconciliation:
    """Dispatches lost jobs again; `run` is the sweep.

    Args:
        database: where the jobs are.
        wakeups: who is told.
        patience: how long a message may take from the broker to an executor that is idle.
        interval: between two sweeps.

    """

    name = "sweep"

    def __init__(self, database: Database, wakeups: Wakeups, *, patience: timedelta, interval: timedelta) -> None:
        self._database = database
        self._wakeups = wakeups
        self._patience = patience
        self._interval = interval

    async def run(self) -> None:
        """Sweep until cancelled. Never ends by a fault of the database."""
        while True:
            await asyncio.sleep(self._interval.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311 - spreads
            try:
                await self.sweep()
            except Unavailable:
                log.warning("waiting jobs not looked through: the database cannot be reached")

    async def sweep(self) -> int:
        """Dispatch the waiting jobs again whose message is lost, and return how many.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._dispatch_all(await self.lost(), expected=False)

    async def lost(self) -> list[JobRow]:
        """Return the waiting jobs whose message is taken for lost.

        Raises:
            Unavailable: the database cannot be reached.

        """
        found: list[JobRow] = []
        for queue, sight in (await self._database.read(self._sights)).items():
            lost = await self._look_through(queue, sight.sent_before)
            # A queue that holds as many messages as jobs wait for has lost none, however long they take.
            if len(lost) > sight.ready:
                found += lost
        return found

    async def dispatch_again(self, lost: Sequence[JobRow]) -> list[bool | AijobsError]:
        """Dispatch jobs again, and return for each whether it was: one that has gone on meanwhile is not.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._each_again(lost, expected=False)

    async def dispatch_all_again(self) -> int:
        """Dispatch every waiting job again, for an engine whose broker has just begun empty; returns how many.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._dispatch_all(await self._look_through("", None), expected=True)

    async def _sights(self, tx: Transaction) -> Mapping[str, "_Sight"]:
        """Return the queues that an executor has waited on for longer than our patience, and what is known of them."""
        idle: dict[str, datetime] = {}
        for executor in await executors.latest(tx, within=FRESH_REPORT):
            if executor.read_at - executor.reported_at > FRESH_REPORT:
                continue
            if executor.disconnected_at is not None or executor.drain_requested_at is not None:
                continue
            for load in executor.queues:
                if load.free_slots and load.idle >= self._patience:
                    idle[load.queue] = max(executor.reported_at, idle.get(load.queue, executor.reported_at))
        rows = await queues.every(tx)
        return {
            queue: sight
            for queue, idle_at in idle.items()
            if (sight := _sight(rows.get(queue), idle_at - self._patience)) is not None
        }

    async def _look_through(self, queue: str, sent_before: datetime | None) -> list[JobRow]:
        """Return the waiting jobs of a queue whose message is lost if what was sent before that moment is.

        Args:
            queue: the queue; empty: all of them.
            sent_before: the moment; None: whatever was sent is lost.

        """
        lost: list[JobRow] = []
        dead = 0
        since = self._patience if sent_before else timedelta(0)
        for look in (job_store.queued, job_store.lapsed):
            last: JobRow | None = None
            while True:
                page = partial(look, queue=queue, after=last, limit=CHUNK, since=since)
                found, lost_here, dead_here = await self._database.read(
                    partial(_judge, page=page, sent_before=sent_before)
                )
                dead += dead_here
                lost += lost_here
                if len(found) < CHUNK:
                    break
                last = found[-1]
        if dead:
            log.error("jobs wait for events that are dead: requeue the events, or cancel the jobs", jobs=dead, **HELP)
        return lost

    async def _dispatch_all(self, lost: Sequence[JobRow], *, expected: bool) -> int:
        return sum(result is True for result in await self._each_again(lost, expected=expected))

    async def _each_again(self, lost: Sequence[JobRow], *, expected: bool) -> list[bool | AijobsError]:
        results: list[bool | AijobsError] = []
        for start in range(0, len(lost), CHUNK):
            work = partial(self._dispatch_again, expected=expected)
            results += await write_each(self._database, lost[start : start + CHUNK], work)
        return results

    async def _dispatch_again(
        self, tx: Transaction, lost: Sequence[JobRow], *, expected: bool
    ) -> list[bool | AijobsError]:
        """Judge again on the locked rows: a lock may have come in between."""
        rows = await job_store.get(tx, [job.job_id for job in lost], lock=True)
        planned = [
            lifecycle.dispatch_again(rows[job.job_id], reason="message lost")
            for job in lost
            if rows[job.job_id].waits and rows[job.job_id].dispatch_no == job.dispatch_no
        ]
        dispatched = list(await transitions.carry_out(tx, self._wakeups, planned))
        if dispatched:
            tx.after_commit(lambda: _tell(dispatched, expected=expected))
        return [job.job_id in dispatched for job in lost]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What is known of a queue that an executor waits on.

    Attributes:
        sent_before: a message that was sent earlier would have arrived.
        ready: messages that the broker held then, at most.

    """

    sent_before: datetime
    ready: int


def _sight(queue: QueueRow | None, idle_since: datetime) -> _Sight | None:
    """Return what two fresh reports say of a queue; None if it is paused or nobody has looked into the broker twice."""
    if queue is None or queue.paused_at is not None or queue.ready_before_at is None or queue.read_at is None:
        return None
    if queue.read_at - queue.ready_before_at > FRESH_DEPTH:
        return None
    return _Sight(
        sent_before=min(idle_since, queue.ready_before_at), ready=max(queue.ready or 0, queue.ready_before or 0)
    )


async def _judge(
    tx: Transaction, *, page: Callable[[Transaction], Awaitable[list[JobRow]]], sent_before: datetime | None
) -> tuple[list[JobRow], list[JobRow], int]:
    """Read a page of waiting jobs; return it, those whose message is lost, and how many wait for a dead event."""
    found = await page(tx)
    keys = {job.job_id: events.dispatch_key(job.job_id, job.dispatch_no) for job in found}
    dispatches = await outbox.dispatches(tx, list(keys.values()))
    latest = [(job, dispatches.get(keys[job.job_id])) for job in found]
    dead = sum(dispatch is not None and dispatch.status == EventStatus.DEAD for _, dispatch in latest)
    return found, [job for job, dispatch in latest if _is_lost(dispatch, sent_before)], dead


def _tell(job_ids: Sequence[str], *, expected: bool) -> None:
    DISPATCHED_AGAIN.inc(len(job_ids))
    say = log.info if expected else log.warning
    say("jobs dispatched again: their messages are lost", jobs=len(job_ids), first=job_ids[0])


def _is_lost(dispatch: Dispatch | None, sent_before: datetime | None) -> bool:
    """Tell whether nothing is on its way that could lead to a lock of a job that waits."""
    if dispatch is None:
        return True
    if dispatch.status == EventStatus.DEAD:
        return False
    if sent_before is None:
        return dispatch.status not in (EventStatus.SCHEDULED, EventStatus.PENDING)
    if dispatch.status in ON_ITS_WAY:
        return False
    return dispatch.settled_at is None or dispatch.settled_at <= sent_before
