"""The sweep: no job waits for ever, whatever became of its message (LC-13).

A job that waits for a lock has an enqueue event under its present dispatch number. Once that is published, the job's
message is in the broker or in the hands of an executor, unless it was lost. It is taken for lost when an executor of
its queue has had a free slot, without a break, for longer than any message takes to arrive: a message that exists would
have been given to it. Then the job is dispatched again under its next number; if the message turns up all the same, the
lock decides. The job's row is judged, not its events: they may be gone, and then that is what was lost.

What was read is judged again on the locked row before it is written, so the sweep may run on every replica at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from services.jobs.wakeups import Wakeups

#: Jobs in one transaction.
CHUNK = 100
#: Older reports of executors say nothing about now.
FRESH_REPORT = timedelta(seconds=15)
#: On its way without our help: the outbox sends it, or releases the claim of a dispatcher that is gone.
ON_ITS_WAY = (EventStatus.SCHEDULED, EventStatus.PENDING, EventStatus.PROCESSING)
DISPATCHED_AGAIN = metrics.counter("messages_lost", "Jobs that were dispatched again because their message was lost")
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
        total = 0
        for queue, idle_at in (await self._database.read(self._idle_queues)).items():
            total += await self._sweep_queue(queue, idle_at - self._patience)
        return total

    async def dispatch_all_again(self) -> int:
        """Dispatch every waiting job again, for an engine whose broker has just begun empty; returns how many.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._sweep_queue("", None)

    async def _idle_queues(self, tx: Transaction) -> Mapping[str, datetime]:
        """Return the queues that an executor has waited on for longer than our patience, and when it last said so."""
        paused = await queues.paused(tx)
        idle: dict[str, datetime] = {}
        for executor in await executors.latest(tx, within=FRESH_REPORT):
            if executor.read_at - executor.reported_at > FRESH_REPORT:
                continue
            if executor.disconnected_at is not None or executor.drain_requested_at is not None:
                continue
            for load in executor.queues:
                if load.free_slots and load.idle >= self._patience and load.queue not in paused:
                    idle[load.queue] = max(executor.reported_at, idle.get(load.queue, executor.reported_at))
        return idle

    async def _sweep_queue(self, queue: str, sent_before: datetime | None) -> int:
        """Go through the waiting jobs of a queue. What was sent before that moment is lost; None: whatever was sent."""
        total, dead = 0, 0
        since = self._patience if sent_before else timedelta(0)
        for look in (job_store.queued, job_store.lapsed):
            last: JobRow | None = None
            while True:
                page = partial(look, queue=queue, after=last, limit=CHUNK, since=since)
                found, lost, dead_here = await self._database.read(partial(_judge, page=page, sent_before=sent_before))
                dead += dead_here
                work = partial(self._dispatch_again, expected=sent_before is None)
                results = await write_each(self._database, lost, work)
                total += sum(result is True for result in results)
                if len(found) < CHUNK:
                    break
                last = found[-1]
        if dead:
            # Listed and sent again by operators, who have no call for it yet.
            log.error("jobs wait for events that are dead: cancel and retry them", queue=queue, jobs=dead)
        return total

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
        return dispatch.status != EventStatus.PENDING
    if dispatch.status in ON_ITS_WAY:
        return False
    return dispatch.published_at is None or dispatch.published_at <= sent_before
