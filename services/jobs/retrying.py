"""Retrying by hand: a new job with the input of one that failed or was cancelled (LC-10, ruling 19).

The old job does not change. The new one is as the old one was made: type, queue, priority, labels, target and snapshot;
its idempotency key is `retry:<old job id>:<n>`. At most one retry of a job is alive at a time. An operator's retry is
no create of the user's, so no quota refuses it.
"""

import json
from dataclasses import dataclass

from uuid_utils import uuid7

from aijobs import canonical
from aijobs.errors import JobNotFound, JobNotRetryable, RetryInProgress, SnapshotExpired
from aijobs.registry import Registry
from aijobs.states import JobState
from services.jobs import transitions
from services.jobs.ranking import QueueOrder, line_of
from services.jobs.store import contents, requests, users
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Kind
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

METHOD = "RetryJob"
RETRYABLE = (JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A request to retry one job."""

    request_id: str
    job_id: str
    reason: str


class JobRetrying:
    """Retries jobs."""

    def __init__(self, database: Database, registry: Registry, wakeups: Wakeups, order: QueueOrder) -> None:
        self._database = database
        self._registry = registry
        self._wakeups = wakeups
        self._order = order

    async def retry(self, caller: str, request: Retry) -> JobRow:
        """Make a new job that does again what an ended one did not achieve, and return it.

        Raises:
            JobNotFound: no such job.
            JobNotRetryable: it has not ended, or it has succeeded.
            RetryInProgress: a retry of it has not ended.
            SnapshotExpired: its input is no longer stored.
            UnknownJobType: its type is no longer installed.
            RequestIdReused: the request id belongs to the retry of another job.
            Unavailable: the database cannot be reached.

        """
        return await self._database.write(lambda tx: self._retry(tx, caller, request))

    async def _retry(self, tx: Transaction, caller: str, request: Retry) -> JobRow:
        old = (await job_store.get(tx, [request.job_id])).get(request.job_id)
        if old is None:
            raise JobNotFound(request.job_id)
        # Puts the retries of a job in line; users come before jobs in the order of locks.
        await users.lock(tx, [old.user_id])
        old = (await job_store.get(tx, [request.job_id], lock=True)).get(request.job_id)
        if old is None:  # deleted since: it ended long ago
            raise JobNotFound(request.job_id)
        key = requests.RequestKey(caller, old.user_id, METHOD, request.request_id)
        fingerprint = canonical.digest(canonical.dump([request.job_id, request.reason]))
        answered = await requests.recall(tx, key, fingerprint)
        if answered is not None:
            return (await job_store.get(tx, [answered.job_id]))[answered.job_id]
        new = await self._insert(tx, caller, request, old)
        await requests.remember(
            tx, [requests.Answered(key=key, fingerprint=fingerprint, job_id=new.job_id, answer_json=json.dumps({}))]
        )
        return new

    async def _insert(self, tx: Transaction, caller: str, request: Retry, old: JobRow) -> JobRow:
        if old.lifecycle_status not in RETRYABLE:
            raise JobNotRetryable(f"job {old.job_id} is {old.lifecycle_status}; only failed and cancelled ones can be")
        self._registry[old.job_type]  # raises if no executor could ever run it
        earlier = await job_store.retries(tx, old.job_id)
        alive = [retry.job_id for retry in earlier if not retry.lifecycle_status.terminal]
        if alive:
            raise RetryInProgress(f"job {old.job_id} is retried already: job {alive[0]} has not ended")
        snapshot = (await contents.snapshots(tx, [old.job_id])).get(old.job_id)
        if snapshot is None:
            raise SnapshotExpired(f"the input of job {old.job_id} is no longer stored")
        job_id = str(uuid7())
        number = len(earlier) + 1
        while await job_store.find_by_key(tx, [(old.user_id, old.job_type, _key(old, number))]):
            # Somebody has created a job under a key that looks like ours.
            number += 1
        copied = (
            *("job_type", "user_id", "target_type", "target_id", "queue", "priority", "labels_json"),
            *("request_fingerprint", "definition_version", "cancellable", "max_retries", "backoff_ms"),
            *("abort_strategy", "run_timeout_ms", "depth", "trace_context"),
        )
        row = {name: getattr(old, name) for name in copied} | {
            "job_id": job_id,
            "idempotency_key": _key(old, number),
            "retry_of": old.job_id,
            "root_job_id": old.root_job_id or old.job_id,
        }
        ranking = await self._order.open(tx, [line_of(old)])
        row["rank_at"] = ranking.rank(line_of(old))
        await ranking.write(tx)
        reason = f"retry of {old.job_id}" + (f": {request.reason}" if request.reason else "")
        rows = await transitions.begin(
            tx, self._wakeups, [(row, snapshot)], actor=f"caller:{caller}", kind=Kind.RETRIED, reason=reason
        )
        return rows[job_id]


def _key(old: JobRow, number: int) -> str:
    return f"retry:{old.job_id}:{number}"
