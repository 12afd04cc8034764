"""The state machine of a job: five named changes, and the notes that change no state (LC-1, LC-2, LC-3).

                      cancel_waiting
            queued ──────────────────────────────▶ cancelled
              │                                        ▲
              │ lock                                   │ cancel_running
              ▼             succeed                    │
            running ──────────────────▶ succeeded      │
              │ │ ─────────────────────▶ failed        │
              │ │             fail                     │
              │ └──────────────────────────────────────┘
              └ note_execution_failed, note_cancel_requested

A constructor refuses what the job's row does not allow and returns a `Change`; `store.changes.apply` writes it with
one guarded UPDATE, so that the database refuses it once more. Every change is one history entry and one step of the
job's sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from aijobs.errors import CancelRequested, IllegalTransition, LeaseConflict, LeaseLost
from aijobs.states import JobState
from services.jobs.store.changes import Change, Kind
from services.jobs.store.jobs import JobRow
from services.jobs.store.time import now, now_plus

NO_LEASE = {"lease_token": None, "locked_by": None, "lock_until": None}
#: What every end of a run writes.
THE_END: Mapping[str, Any] = {"finished_at": now(), **NO_LEASE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What an executor shows with every report: the attempt and the token are the fence (LC-5)."""

    job_id: str
    attempt: int
    lease_token: str


def lock(job: JobRow, lease_token: str, executor_id: str, span: timedelta) -> Change:
    """Queued → running: hand the lease to an executor (LC-4).

    Raises:
        LeaseConflict: somebody else holds it.
        IllegalTransition: the job has ended.

    """
    if job.lifecycle_status == JobState.RUNNING:
        raise LeaseConflict(f"job {job.job_id} is leased")
    _require(job, JobState.QUEUED, JobState.RUNNING)
    return Change(
        job_id=job.job_id,
        kind=Kind.LOCKED,
        from_state=JobState.QUEUED,
        to_state=JobState.RUNNING,
        sequence=job.sequence + 1,
        attempt=job.attempt + 1,
        actor=f"executor:{executor_id}",
        lease_token=lease_token,
        guard={"attempt": job.attempt},
        values={
            "attempt": job.attempt + 1,
            "lease_token": lease_token,
            "locked_by": executor_id,
            "locked_at": now(),
            "lock_until": now_plus(span),
            **({} if job.started_at else {"started_at": now()}),
        },
    )


def succeed(job: JobRow, lease: Lease, *, output_json: str, output_hash: str, artifact_count: int) -> Change:
    """Running → succeeded, with the output.

    Raises:
        LeaseLost: the lease is not the present one.
        CancelRequested: a cancel was acknowledged; the run may only end cancelled.

    """
    _require_no_cancel(job, lease)
    values = {
        "output_json": output_json,
        "output_hash": output_hash,
        "artifact_count": artifact_count,
        "progress": 100,
        **THE_END,
    }
    return _by_holder(job, lease, Kind.SUCCEEDED, JobState.SUCCEEDED, values)


def fail(job: JobRow, lease: Lease, *, execution: int, code: str, public: str, internal: str) -> Change:
    """Running → failed: not retryable, or retries used up.

    Raises:
        LeaseLost: the lease is not the present one.
        CancelRequested: a cancel was acknowledged; the run may only end cancelled.

    """
    _require_no_cancel(job, lease)
    values = {
        "retry_count": job.retry_count + 1,
        "error_code": code,
        "error_public": public,
        "error_internal": internal,
        **THE_END,
    }
    change = _by_holder(job, lease, Kind.FAILED, JobState.FAILED, values)
    return replace(change, reason=code, execution=execution, internal=internal)


def cancel_waiting(job: JobRow, *, actor: str, reason: str) -> Change:
    """Queued → cancelled, at once (LC-9).

    Raises:
        IllegalTransition: the job is not queued.

    """
    _require(job, JobState.QUEUED, JobState.CANCELLED)
    return Change(
        job_id=job.job_id,
        kind=Kind.CANCELLED,
        from_state=JobState.QUEUED,
        to_state=JobState.CANCELLED,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=actor,
        reason=reason,
        values={"finished_at": now()},
    )


def cancel_running(job: JobRow, lease: Lease) -> Change:
    """Running → cancelled: the executor confirms that it stopped.

    Raises:
        LeaseLost: the lease is not the present one.
        IllegalTransition: nobody asked for a cancel.

    """
    _require_lease(job, lease)
    if job.cancel_requested_at is None:
        raise IllegalTransition(f"job {job.job_id}: no change from running to cancelled without a cancel request")
    return _by_holder(job, lease, Kind.CANCELLED, JobState.CANCELLED, THE_END)


def note_execution_failed(
    job: JobRow, lease: Lease, *, execution: int, code: str, internal: str, feedback: str
) -> Change:
    """Running, still: an execution failed and another one follows; counted durably (EX-2).

    Raises:
        LeaseLost: the lease is not the present one.
        CancelRequested: a cancel was acknowledged; the run may only end cancelled.

    """
    _require_no_cancel(job, lease)
    values = {"retry_count": job.retry_count + 1, "progress": 0}
    change = _by_holder(job, lease, Kind.EXECUTION_FAILED, JobState.RUNNING, values)
    return replace(change, reason=code, execution=execution, internal=internal, feedback=feedback)


def note_cancel_requested(job: JobRow, *, actor: str, reason: str) -> Change:
    """Running, still: from here on the run can only end cancelled (LC-9).

    Raises:
        IllegalTransition: the job is not running.

    """
    _require(job, JobState.RUNNING, JobState.CANCELLED)
    return Change(
        job_id=job.job_id,
        kind=Kind.CANCEL_REQUESTED,
        from_state=JobState.RUNNING,
        to_state=JobState.RUNNING,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=actor,
        reason=reason,
        values={"cancel_requested_at": now()},
    )


def holds(job: JobRow, lease: Lease) -> bool:
    """Tell whether a lease is the present one of its job."""
    return (
        job.lifecycle_status == JobState.RUNNING
        and job.attempt == lease.attempt
        and job.lease_token == lease.lease_token
    )


def _require(job: JobRow, present: JobState, wanted: JobState) -> None:
    if job.lifecycle_status != present:
        raise IllegalTransition(f"job {job.job_id}: no change from {job.lifecycle_status} to {wanted}")


def _require_lease(job: JobRow, lease: Lease) -> None:
    if not holds(job, lease):
        raise LeaseLost(f"job {job.job_id}: attempt {lease.attempt} no longer holds the lease")


def _require_no_cancel(job: JobRow, lease: Lease) -> None:
    _require_lease(job, lease)
    if job.cancel_requested_at is not None:
        raise CancelRequested(f"job {job.job_id}: a cancel was requested; confirm with a cancelled outcome")


def _by_holder(job: JobRow, lease: Lease, kind: Kind, to_state: JobState, values: Mapping[str, Any]) -> Change:
    """What every report of a lease's holder shares: the fence in the guard, and the token in the history."""
    return Change(
        job_id=job.job_id,
        kind=kind,
        from_state=JobState.RUNNING,
        to_state=to_state,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=f"executor:{job.locked_by}",
        lease_token=lease.lease_token,
        guard={"attempt": lease.attempt, "lease_token": lease.lease_token},
        values=values,
    )
