"""Handing out leases and renewing them (LC-4…LC-6).

The lock is a compare-and-set on the job's row: of N executors that want a job exactly one gets it. The lease is the
attempt and a token that the executor made itself, so that the repeat of a lock whose answer was lost is recognised.
The rows of a batch are locked first, in the order of their ids; what is decided about them is decided on locked rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from aijobs.errors import AijobsError, InternalError, JobNotFound, LeaseConflict, LeaseLost, NotAttempted
from aijobs.states import JobState
from services.jobs import lifecycle
from services.jobs.batches import write_each
from services.jobs.lifecycle import Lease
from services.jobs.store import changes, contents, history
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change
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
    snapshot: Snapshot
    earlier_errors: Sequence[HistoryRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """A heartbeat for one run."""

    lease: Lease
    progress: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """The lease goes on."""

    remaining: timedelta
    cancel_requested: bool


class JobLeasing:
    """Hands out leases and renews them."""

    def __init__(self, database: Database, wakeups: Wakeups, lease_time: timedelta) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lease_time = lease_time

    async def lock(self, executor_id: str, batch: Sequence[LockRequest]) -> list[Locked | AijobsError]:
        """Take leases. Of N executors that want a job exactly one gets it.

        Errors per item: JobNotFound, IllegalTransition (it has ended), LeaseConflict, NotAttempted (too much for one
        answer: ask again).

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, items: Sequence[LockRequest]) -> list[Locked | AijobsError]:
            return await self._lock(tx, executor_id, items)

        return await write_each(self._database, batch, work)

    async def extend(self, batch: Sequence[Extend]) -> list[Extended | AijobsError]:
        """Renew leases and store progress.

        Errors per item: LeaseLost.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await write_each(self._database, batch, self._extend)

    async def _lock(
        self, tx: Transaction, executor_id: str, batch: Sequence[LockRequest]
    ) -> list[Locked | AijobsError]:
        rows = await job_store.get(tx, (item.job_id for item in batch), lock=True)
        snapshots = await contents.snapshots(tx, rows)
        errors = await history.failed_executions(tx, [job.job_id for job in rows.values() if job.retry_count])
        room = LARGEST_ANSWER
        refusals: dict[int, AijobsError] = {}
        granted: dict[str, Change] = {}
        for index, item in enumerate(batch):
            try:
                job, snapshot = rows.get(item.job_id), snapshots.get(item.job_id)
                change = self._grant(executor_id, item, job, granted.get(item.job_id))
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
        await changes.apply(tx, list(granted.values()))
        tx.after_commit(lambda: self._wakeups.jobs_changed(granted))
        rows = await job_store.get(tx, [item.job_id for index, item in enumerate(batch) if index not in refusals])
        return [
            refusals[index]
            if index in refusals
            else Locked(
                job=rows[item.job_id],
                remaining=(rows[item.job_id].lock_until or rows[item.job_id].read_at) - rows[item.job_id].read_at,
                snapshot=snapshots[item.job_id],
                earlier_errors=errors.get(item.job_id, [])[-MOST_EARLIER_ERRORS:],
            )
            for index, item in enumerate(batch)
        ]

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
                remaining=self._lease_time, cancel_requested=rows[item.lease.job_id].cancel_requested_at is not None
            )
            if _held(rows, item.lease)
            else LeaseLost(f"job {item.lease.job_id}: attempt {item.lease.attempt} no longer holds the lease")
            for item in batch
        ]


def _answer_size(job: JobRow, snapshot: Snapshot, errors: Sequence[HistoryRow]) -> int:
    """Bound the bytes that a locked job takes in an answer."""
    texts = [snapshot.content_json, job.labels_json]
    texts += [entry.feedback or "" for entry in errors[-MOST_EARLIER_ERRORS:]]
    return sum(len(text.encode()) for text in texts) + OTHER_FIELDS


def _held(rows: Mapping[str, JobRow], lease: Lease) -> bool:
    job = rows.get(lease.job_id)
    return job is not None and lifecycle.holds(job, lease)
