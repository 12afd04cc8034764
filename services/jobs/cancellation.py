"""Cancelling with a truthful answer (LC-9, ruling 9).

queued, or running with a lapsed lease → cancelled at once
running                                → a flag; from that commit on a result and a failure are refused, so the run can
                                         only end cancelled; the executor's session tells it to stop
otherwise                              → refused, saying why
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aijobs import canonical
from aijobs.errors import AijobsError, JobAlreadyCancelled, JobNotCancellable
from aijobs.states import JobState
from services.jobs import lifecycle, transitions
from services.jobs.batches import write_each
from services.jobs.queries import Viewer, visible
from services.jobs.store import jobs as job_store
from services.jobs.store import requests
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

METHOD = "CancelJob"


class CancelOutcome(StrEnum):
    """What a cancel did."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A request to cancel one job."""

    request_id: str
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAnswer:
    """What was done, and the job afterwards."""

    outcome: CancelOutcome
    job: JobRow


class JobCancellation:
    """Cancels jobs."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups

    async def cancel(self, viewer: Viewer, request: Cancel) -> CancelAnswer:
        """Cancel a job that the viewer may see.

        Raises:
            JobNotFound: no such job, or somebody else's.
            JobNotCancellable: it has succeeded or failed, or its type cannot be cancelled.
            JobAlreadyCancelled: another request cancelled it.
            RequestIdReused: the request id belongs to the cancel of another job.
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, batch: Sequence[Cancel]) -> list[CancelAnswer | AijobsError]:
            return [await self._cancel(tx, viewer, item) for item in batch]

        (answer,) = await write_each(self._database, [request], work)
        if isinstance(answer, AijobsError):
            raise answer
        return answer

    async def _cancel(self, tx: Transaction, viewer: Viewer, request: Cancel) -> CancelAnswer:
        job = visible(
            viewer, request.job_id, (await job_store.get(tx, [request.job_id], lock=True)).get(request.job_id)
        )
        key = requests.RequestKey(viewer.caller, job.user_id, METHOD, request.request_id)
        fingerprint = canonical.digest(canonical.dump([request.job_id, request.reason]))
        answered = await requests.recall(tx, key, fingerprint)
        if answered is not None:
            return CancelAnswer(outcome=CancelOutcome(json.loads(answered.answer_json)["outcome"]), job=job)
        answer = await self._change(tx, job, f"caller:{viewer.caller}", request.reason)
        await requests.remember(
            tx,
            [
                requests.Answered(
                    key=key,
                    fingerprint=fingerprint,
                    job_id=job.job_id,
                    answer_json=json.dumps({"outcome": answer.outcome}),
                )
            ],
        )
        return answer

    async def _change(self, tx: Transaction, job: JobRow, actor: str, reason: str) -> CancelAnswer:
        if job.lifecycle_status == JobState.CANCELLED:
            raise JobAlreadyCancelled(job.job_id)
        if job.lifecycle_status.terminal:
            raise JobNotCancellable(f"job {job.job_id} has {job.lifecycle_status} already")
        if not job.cancellable:
            raise JobNotCancellable(f"jobs of type {job.job_type} cannot be cancelled")
        if job.cancel_requested_at is not None:
            return CancelAnswer(outcome=CancelOutcome.REQUESTED, job=job)
        if job.waits:
            outcome, change = CancelOutcome.CANCELLED, lifecycle.cancel_waiting(job, actor=actor, reason=reason)
        else:
            outcome, change = CancelOutcome.REQUESTED, lifecycle.note_cancel_requested(job, actor=actor, reason=reason)
            tx.after_commit(self._wakeups.commands.give)
        rows = await transitions.carry_out(tx, self._wakeups, [change])
        return CancelAnswer(outcome=outcome, job=rows[job.job_id])
