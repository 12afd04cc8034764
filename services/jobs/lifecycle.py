"""The state machine of a job: five named changes, and the notes that change no state (LC-1, LC-2, LC-3).

                      cancel_waiting
            queued ──────────────────────────────▶ cancelled
              │                                        ▲
              │ lock                                   │ cancel_running, cancel_waiting, lapse
              ▼             succeed                    │
            running ──────────────────▶ succeeded      │
              │ │ ─────────────────────▶ failed        │
              │ │           fail, lapse                │
              │ └──────────────────────────────────────┘
              └ note_execution_failed, note_cancel_requested, and the life of a lease:

    lock ──▶ leased ──lapse, hand_back──▶ lapsed ──lock──▶ leased, attempt + 1
                                            └ dispatched again, under the next dispatch number

A run whose lease lapsed stays `running` and waits for a lock as a queued job does (ruling 1); nobody holds it then. A
lease lapses once: it is one compare-and-set that sets lapsed_at, takes the token away and counts dispatch_no up (LC-7).

A constructor refuses what the job's row does not allow and returns a `Change`; `store.changes.apply` writes it with
one guarded UPDATE, so that the database refuses it once more. Every change is one history entry and one step of the
job's sequence. The constructors read nothing but the row: the model in `tests/model` runs on these very functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from aijobs.errors import CancelRequested, IllegalTransition, LeaseConflict, LeaseLost
from aijobs.failures import treatment
from aijobs.states import JobState
from services.jobs.store.changes import Change, Kind
from services.jobs.store.jobs import JobRow
from services.jobs.store.time import now, now_plus

#: Actor of the changes that nobody asked for.
ENGINE = "engine"
LEASE_EXPIRED = "INTERNAL_LEASE_EXPIRED"

NO_LEASE = {"lease_token": None, "locked_by": None, "lock_until": None, "lapsed_at": None}
#: What every end of a run writes.
THE_END: Mapping[str, Any] = {"finished_at": now(), **NO_LEASE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What an executor shows with every report: the attempt and the token are the fence (LC-5)."""

    job_id: str
    attempt: int
    lease_token: str


def lock(job: JobRow, lease_token: str, executor_id: str, span: timedelta) -> Change:
    """Queued → running, or take over a run whose lease lapsed: hand the lease to an executor (LC-4).

    Raises:
        LeaseConflict: somebody else holds it.
        IllegalTransition: the job has ended.

    """
    if job.leased:
        raise LeaseConflict(f"job {job.job_id} is leased")
    _require_waiting(job, JobState.RUNNING)
    return Change(
        job_id=job.job_id,
        kind=Kind.LOCKED if job.lifecycle_status == JobState.QUEUED else Kind.TAKEN_OVER,
        from_state=job.lifecycle_status,
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
            "lapsed_at": None,
            "progress": 0,
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
    """Queued, or running with a lapsed lease → cancelled, at once (LC-9).

    Raises:
        IllegalTransition: the job does not wait for a lock.

    """
    _require_waiting(job, JobState.CANCELLED)
    return Change(
        job_id=job.job_id,
        kind=Kind.CANCELLED,
        from_state=job.lifecycle_status,
        to_state=JobState.CANCELLED,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=actor,
        reason=reason,
        values=THE_END,
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


def hand_back(job: JobRow, lease: Lease, *, reason: str, delay: timedelta) -> Change:
    """Lapse a lease that its holder gives back: nothing is counted but the dispatch (LC-7, EX-10).

    With a cancel requested, the run ends cancelled.

    Raises:
        LeaseLost: the lease is not the present one.

    """
    _require_lease(job, lease)
    if job.cancel_requested_at is not None:
        return replace(_by_holder(job, lease, Kind.CANCELLED, JobState.CANCELLED, THE_END), reason=reason)
    values = {**_lapsed(job), "due_at": now_plus(delay) if delay else None}
    return replace(_by_holder(job, lease, Kind.HANDED_BACK, JobState.RUNNING, values), reason=reason)


def lapse(job: JobRow, *, reason: str, most_takeovers: int) -> Change:
    """Lapse a lease whose holder is gone: it expired, or the holder's session was lost (LC-7).

    The run ends cancelled if that was requested; else it waits for a takeover, or fails when those are used up.

    Raises:
        IllegalTransition: nobody holds a lease of the job.

    """
    if not job.leased:
        raise IllegalTransition(f"job {job.job_id}: no lease to lapse while {job.lifecycle_status}")
    if job.cancel_requested_at is not None:
        kind, to_state, values = Kind.CANCELLED, JobState.CANCELLED, THE_END
    elif job.takeover_count < most_takeovers:
        kind, to_state, values = Kind.LAPSED, JobState.RUNNING, _lapsed(job) | {"due_at": None}
        values["takeover_count"] = job.takeover_count + 1
    else:
        kind, to_state = Kind.FAILED, JobState.FAILED
        values = {
            "error_code": LEASE_EXPIRED,
            "error_public": treatment(LEASE_EXPIRED).public,
            "error_internal": f"{reason}; taken over {job.takeover_count} times before",
            **THE_END,
        }
    return Change(
        job_id=job.job_id,
        kind=kind,
        from_state=JobState.RUNNING,
        to_state=to_state,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=ENGINE,
        reason=LEASE_EXPIRED if to_state == JobState.FAILED else reason,
        # Also the end of the lease, although heartbeats are no step of the sequence: one that came in between saves it.
        guard={"attempt": job.attempt, "lease_token": job.lease_token, "lock_until": job.lock_until},
        values=values,
    )


def dispatch_again(job: JobRow, *, reason: str, delay: timedelta | None = None) -> Change:
    """Count the dispatch number up for a job that waits for a lock: its message was used up, or is lost (ruling 20).

    Args:
        job: queued, or running with a lapsed lease.
        reason: why.
        delay: also make it wait; None: leave the time at which it is due.

    Raises:
        IllegalTransition: the job does not wait for a lock.

    """
    _require_waiting(job, JobState.RUNNING)
    return Change(
        job_id=job.job_id,
        kind=Kind.DISPATCHED_AGAIN,
        from_state=job.lifecycle_status,
        to_state=job.lifecycle_status,
        sequence=job.sequence + 1,
        attempt=job.attempt,
        actor=ENGINE,
        reason=reason,
        guard={"dispatch_no": job.dispatch_no},
        values={"dispatch_no": job.dispatch_no + 1, **({} if delay is None else {"due_at": now_plus(delay)})},
    )


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
        IllegalTransition: the job is not running, or nobody holds its lease.

    """
    _require(job, JobState.RUNNING, JobState.CANCELLED)
    if job.lapsed_at is not None:
        raise IllegalTransition(f"job {job.job_id}: nobody runs it; it is cancelled at once")
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
    return job.leased and (job.attempt, job.lease_token) == (lease.attempt, lease.lease_token)


def lost(lease: Lease) -> LeaseLost:
    """Refuse a call with a lease that is not the present one (LC-5)."""
    return LeaseLost(f"job {lease.job_id}: attempt {lease.attempt} no longer holds the lease")


def _lapsed(job: JobRow) -> dict[str, Any]:
    """Return what a lapse writes: nobody holds the lease, and the next dispatch goes out."""
    return {**NO_LEASE, "lapsed_at": now(), "dispatch_no": job.dispatch_no + 1}


def _require(job: JobRow, present: JobState, wanted: JobState) -> None:
    if job.lifecycle_status != present:
        raise IllegalTransition(f"job {job.job_id}: no change from {job.lifecycle_status} to {wanted}")


def _require_waiting(job: JobRow, wanted: JobState) -> None:
    if not job.waits:
        raise IllegalTransition(f"job {job.job_id}: no change from {job.lifecycle_status} to {wanted}")


def _require_lease(job: JobRow, lease: Lease) -> None:
    if not holds(job, lease):
        raise lost(lease)


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
