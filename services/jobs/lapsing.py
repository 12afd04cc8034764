"""Ending leases whose holder is gone (LC-7).

Three things end a lease without an outcome: its holder gives it back (`execution.py`), its holder's session is lost
(`sessions.py`), or nobody renewed it in time, which the reaper here finds. The rows are read without locks, then locked
in the order of their ids and judged again: a heartbeat or a report that came in between has saved its run. So the
reaper may run on every replica at once.
"""

import asyncio
import random
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import structlog

from aijobs import metrics
from aijobs.errors import AijobsError, Unavailable
from services.jobs import lifecycle, transitions
from services.jobs.batches import write_each
from services.jobs.store import executors
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

#: Leases in one transaction of the reaper.
CHUNK = 100
#: Executors that were not seen for so long are forgotten.
FORGET_EXECUTOR_AFTER = timedelta(days=2)
FORGET_CHUNK = 500
#: By so much the reaper's pauses are longer or shorter than its interval, so that replicas spread.
SPREAD = 0.1
LAPSED = metrics.counter("leases_lapsed", "Leases that ended without a report", "reason", "outcome")
log = structlog.get_logger()


class JobLapsing:
    """Ends leases; `run` is the reaper.

    Args:
        database: where the jobs are.
        wakeups: who is told.
        most_takeovers: how often a job may lose its holder and still be run again (ruling 5).
        grace: how long after its end a lease may still be renewed.
        interval: between two looks of the reaper.

    """

    name = "reaper"

    def __init__(
        self, database: Database, wakeups: Wakeups, *, most_takeovers: int, grace: timedelta, interval: timedelta
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._most_takeovers = most_takeovers
        self._grace = grace
        self._interval = interval

    async def run(self) -> None:
        """Reap until cancelled. Never ends by a fault of the database."""
        while True:
            await asyncio.sleep(self._interval.total_seconds() * random.uniform(1 - SPREAD, 1 + SPREAD))  # noqa: S311 - spreads
            try:
                await self.reap()
                await self._database.write(
                    lambda tx: executors.forget(tx, unseen=FORGET_EXECUTOR_AFTER, limit=FORGET_CHUNK)
                )
            except Unavailable:
                log.warning("leases not reaped: the database cannot be reached")

    async def reap(self) -> int:
        """Lapse the leases that ended longer than the grace ago, and return how many.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._lapse_expired(self._grace)

    @property
    def overdue_after(self) -> timedelta:
        """How long after its end a lease has lapsed for certain, if a reaper is at work."""
        return self._grace + self._interval * (1 + SPREAD)

    async def lapse_expired_of(self, job_ids: Sequence[str]) -> list[bool | AijobsError]:
        """Lapse the leases of these jobs that ended longer than the grace ago, and return for each whether it did.

        Raises:
            Unavailable: the database cannot be reached.

        """
        results: list[bool | AijobsError] = []
        for start in range(0, len(job_ids), CHUNK):
            work = partial(self._lapse_if_expired, grace=self._grace)
            results += await write_each(self._database, job_ids[start : start + CHUNK], work)
        return results

    async def lapse_every_lease(self) -> int:
        """Lapse all leases and forget all executors, for an engine that has yet to start its only one.

        Returns how many leases that were.

        Raises:
            Unavailable: the database cannot be reached.

        """
        lapsed = await self._lapse_expired(None)
        await self._database.write(executors.remove_all)
        return lapsed

    async def lapse_session(self, tx: Transaction, executor_id: str) -> None:
        """Lapse every lease of an executor, whose row the transaction holds."""
        rows = await job_store.get(tx, await executors.held_jobs(tx, executor_id), lock=True)
        await self._lapse(tx, [job for job in rows.values() if job.leased], "session lost")

    async def _lapse_expired(self, grace: timedelta | None) -> int:
        total, passed_over = 0, 0
        while True:
            look = partial(job_store.expired_leases, grace=grace, limit=CHUNK, passed_over=passed_over)
            ids = await self._database.read(look)
            results = await write_each(self._database, ids, partial(self._lapse_if_expired, grace=grace))
            lapsed = sum(result is True for result in results)
            total += lapsed
            # What cannot be written, whatever the reason, stays in front, and is in nobody's way.
            passed_over += len(ids) - lapsed
            if len(ids) < CHUNK:
                return total

    async def _lapse_if_expired(
        self, tx: Transaction, job_ids: Sequence[str], *, grace: timedelta | None
    ) -> list[bool | AijobsError]:
        """Judge again on the locked rows: a heartbeat or a report may have come in between."""
        rows = await job_store.get(tx, job_ids, lock=True)
        expired = {job.job_id: job for job in rows.values() if job.leased and _expired(job, grace)}
        await self._lapse(tx, list(expired.values()), "lease expired" if grace is not None else "engine restarted")
        return [job_id in expired for job_id in job_ids]

    async def _lapse(self, tx: Transaction, held: Sequence[JobRow], reason: str) -> None:
        planned = [lifecycle.lapse(job, reason=reason, most_takeovers=self._most_takeovers) for job in held]
        await transitions.carry_out(tx, self._wakeups, planned)
        tx.after_commit(lambda: _tell(planned, reason))


def _tell(planned: Sequence[Change], reason: str) -> None:
    for change in planned:
        LAPSED.labels(reason, change.kind).inc()
        log.warning(
            "lease lapsed", job_id=change.job_id, attempt=change.attempt, reason=reason, outcome=str(change.kind)
        )


def _expired(job: JobRow, grace: timedelta | None) -> bool:
    return grace is None or (job.lock_until is not None and job.lock_until < job.read_at - grace)
