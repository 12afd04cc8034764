"""Handing out leases, taking over lapsed ones, and renewing them (LC-4…LC-6).

The lock is a compare-and-set on the job's row: of N executors that want a job exactly one gets it. The lease is the
attempt and a token that the executor made itself, so that the repeat of a lock whose answer was lost is recognised.
The rows of a batch are locked first, in the order of their ids; what is decided about them is decided on locked rows.

A job that cannot start now (its queue is paused, it is not due, or the executor does not know its type) is refused and
dispatched again in the same transaction, since the message that led here is used up (ruling 20). Its event waits with
it: until the queue is resumed, the job is due, or five seconds are over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from aijobs.errors import (
    AijobsError,
    InternalError,
    JobNotFound,
    JobNotReady,
    LeaseConflict,
    NotAttempted,
    SessionLost,
)
from aijobs.states import JobState
from services.jobs import lifecycle, transitions
from services.jobs.batches import write_each
from services.jobs.lifecycle import Lease
from services.jobs.store import changes, contents, executors, history, queues
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change, Kind
from services.jobs.store.contents import Snapshot
from services.jobs.store.database import Database, Transaction
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow, Renewal
from services.jobs.wakeups import Wakeups

#: Snapshots in one answer to a lock; gRPC takes 4 MiB.
LARGEST_ANSWER = 3 * 1024 * 1024
#: Ids, names and times of one job in an answer, all of them at their longest.
OTHER_FIELDS = 2048
MOST_EARLIER_ERRORS = 5
#: A holder that cannot renew has stopped when so much of the grace is over, so that two never run a job (LC-6).
HELD_SHARE_OF_GRACE = 2 / 3
#: How long a job waits that this executor does not know: a newer one may. Doubled with each dispatch.
UNKNOWN_TYPE_DELAY = timedelta(seconds=5)
LONGEST_UNKNOWN_TYPE_DELAY = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An executor that locks jobs, in its present session (LC-8)."""

    executor_id: str
    session_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """A wish for one job's lease. The token is made by the executor, so that a repeat is recognised."""

    job_id: str
    lease_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A lease and what is needed to run the job."""

    job: JobRow
    remaining: timedelta
    abort_after: timedelta
    snapshot: Snapshot
    earlier_errors: Sequence[HistoryRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """A heartbeat for one run."""

    lease: Lease
    progress: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """The lease goes on. Without a renewal for `abort_after`, the holder has to stop by itself (LC-6)."""

    remaining: timedelta
    abort_after: timedelta
    cancel_requested: bool


class JobLeasing:
    """Hands out leases and renews them.

    Args:
        database: where the jobs are.
        wakeups: who is told.
        lease_time: how long a lease lasts without a renewal.
        grace: how long after that the reaper waits; an executor that cannot renew stops before it is over.

    """

    def __init__(self, database: Database, wakeups: Wakeups, *, lease_time: timedelta, grace: timedelta) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lease_time = lease_time
        self._grace = grace

    async def lock(self, holder: Holder, batch: Sequence[LockRequest]) -> list[Locked | AijobsError]:
        """Take leases. Of N executors that want a job exactly one gets it.

        Errors per item: SessionLost (of all items), JobNotFound, IllegalTransition (it has ended), LeaseConflict,
        JobNotReady (it was dispatched again), NotAttempted (too much for one answer: ask again).

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, items: Sequence[LockRequest]) -> list[Locked | AijobsError]:
            return await self._lock(tx, holder, items)

        return await write_each(self._database, batch, work)

    async def extend(self, executor_id: str, batch: Sequence[Extend]) -> list[Extended | AijobsError]:
        """Renew leases and store progress. An executor that has lost its session may still renew what it holds.

        Errors per item: LeaseLost.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, items: Sequence[Extend]) -> list[Extended | AijobsError]:
            await executors.sign(tx, executor_id)
            return await self._extend(tx, items)

        return await write_each(self._database, batch, work)

    async def _lock(self, tx: Transaction, holder: Holder, batch: Sequence[LockRequest]) -> list[Locked | AijobsError]:
        executor = await executors.get(tx, holder.executor_id, share=True)
        if executor is None or executor.session_epoch != holder.session_epoch or executor.disconnected_at is not None:
            # It may be the late call of a process that is gone: no sign of life, and no lease that nobody knows of.
            lost = SessionLost(f"executor {holder.executor_id}: session {holder.session_epoch} is not open")
            return [lost] * len(batch)
        paused, known = await queues.paused(tx), frozenset(executor.job_types)
        rows = await job_store.get(tx, (item.job_id for item in batch), lock=True)
        tokens = await history.tokens(tx, [job.job_id for job in rows.values() if job.attempt or job.dispatch_no > 1])
        snapshots = await contents.snapshots(tx, rows)
        errors = await history.failed_executions(tx, [job.job_id for job in rows.values() if job.retry_count])
        room = LARGEST_ANSWER
        refusals: dict[int, AijobsError] = {}
        granted: dict[str, Change] = {}
        again: dict[str, Change] = {}
        for index, item in enumerate(batch):
            try:
                job, snapshot = rows.get(item.job_id), snapshots.get(item.job_id)
                self._require_fresh(item, job, tokens.get(item.job_id, {}))
                if job is not None and (waiting := _not_ready(job, paused, known)) is not None:
                    again.setdefault(item.job_id, replace(waiting, lease_token=item.lease_token))
                    raise JobNotReady(f"job {item.job_id}: {waiting.reason}")
                change = self._grant(holder.executor_id, item, job, granted.get(item.job_id))
                if job is None or snapshot is None:
                    raise InternalError(f"job {item.job_id} has no snapshot")
                size = _answer_size(job, snapshot, errors.get(item.job_id, ()))
                if size > room and index > 0:
                    raise NotAttempted("the answer is full")
                room -= size
                if change is not None:
                    granted[item.job_id] = change
            except AijobsError as error:
                refusals[index] = error
        rows |= await transitions.carry_out(tx, self._wakeups, [*granted.values(), *again.values()])
        return [
            refusals[index]
            if index in refusals
            else self._locked(rows[item.job_id], snapshots[item.job_id], errors.get(item.job_id, []))
            for index, item in enumerate(batch)
        ]

    def _locked(self, job: JobRow, snapshot: Snapshot, errors: Sequence[HistoryRow]) -> Locked:
        remaining = (job.lock_until or job.read_at) - job.read_at
        return Locked(
            job=job,
            remaining=remaining,
            abort_after=remaining + self._grace * HELD_SHARE_OF_GRACE,
            snapshot=snapshot,
            earlier_errors=errors[-MOST_EARLIER_ERRORS:],
        )

    @staticmethod
    def _require_fresh(item: LockRequest, job: JobRow | None, tokens: Mapping[str, Kind]) -> None:
        """Answer the repeat of a lock that was refused, and refuse a token whose lease is over."""
        kind = tokens.get(item.lease_token)
        if kind == Kind.DISPATCHED_AGAIN:
            raise JobNotReady(f"job {item.job_id}: dispatched again")
        if kind is not None and (job is None or item.lease_token != job.lease_token):
            raise LeaseConflict(f"job {item.job_id}: the lease of this token is over")

    def _grant(self, executor_id: str, item: LockRequest, job: JobRow | None, earlier: Change | None) -> Change | None:
        """Return the change that gives an item its lease; None if it has it already, by a repeat."""
        if job is None:
            raise JobNotFound(item.job_id)
        if earlier is not None:
            # The same job twice in one batch: the first one has it, and the second one only if it is the same.
            if earlier.lease_token != item.lease_token:
                raise LeaseConflict(f"job {item.job_id} is leased")
            return None
        if self._already_locked(job, item):
            return None
        return lifecycle.lock(job, item.lease_token, executor_id, self._lease_time)

    @staticmethod
    def _already_locked(job: JobRow, item: LockRequest) -> bool:
        return job.lifecycle_status == JobState.RUNNING and job.lease_token == item.lease_token

    async def _extend(self, tx: Transaction, batch: Sequence[Extend]) -> list[Extended | AijobsError]:
        rows = await job_store.get(tx, (item.lease.job_id for item in batch), lock=True)
        renewals = [
            Renewal(
                job_id=item.lease.job_id,
                attempt=item.lease.attempt,
                lease_token=item.lease.lease_token,
                progress=item.progress,
            )
            for item in batch
            if _held(rows, item.lease)
        ]
        if await job_store.extend(tx, renewals, self._lease_time) != len(renewals):
            raise changes.StaleChange("a lease changed while it was renewed")
        moved = [renewal.job_id for renewal in renewals if renewal.progress is not None]
        if moved:
            tx.after_commit(lambda: self._wakeups.jobs_changed(moved))
        return [
            Extended(
                remaining=self._lease_time,
                abort_after=self._lease_time + self._grace * HELD_SHARE_OF_GRACE,
                cancel_requested=rows[item.lease.job_id].cancel_requested_at is not None,
            )
            if _held(rows, item.lease)
            else lifecycle.lost(item.lease)
            for item in batch
        ]


def _not_ready(job: JobRow, paused: frozenset[str], known: frozenset[str]) -> Change | None:
    """Return the change that dispatches a job again which cannot start now; None: it can, or does not wait at all.

    Args:
        job: the job.
        paused: queues that are paused.
        known: job types that the executor can run.

    """
    if not job.waits:
        return None
    if job.queue in paused:
        return lifecycle.dispatch_again(job, reason="queue paused")
    if not job.due:
        return lifecycle.dispatch_again(job, reason="not due")
    if job.job_type not in known:
        delay = min(UNKNOWN_TYPE_DELAY * 2 ** min(job.dispatch_no - 1, 10), LONGEST_UNKNOWN_TYPE_DELAY)
        return lifecycle.dispatch_again(job, reason="job type unknown to the executor", delay=delay)
    return None


def _answer_size(job: JobRow, snapshot: Snapshot, errors: Sequence[HistoryRow]) -> int:
    """Bound the bytes that a locked job takes in an answer."""
    texts = [snapshot.content_json, job.labels_json]
    texts += [entry.feedback or "" for entry in errors[-MOST_EARLIER_ERRORS:]]
    return sum(len(text.encode()) for text in texts) + OTHER_FIELDS


def _held(rows: Mapping[str, JobRow], lease: Lease) -> bool:
    job = rows.get(lease.job_id)
    return job is not None and lifecycle.holds(job, lease)
