"""What the end of an execution's run means for the job: the one table (HA-8).

run of the harness    because                         reported
SUCCESS                                               succeeded
FAILED                                                failed, by the taxonomy
TIMED_OUT                                             failed, TIMEOUT: by the abort strategy
BUDGET_EXHAUSTED                                      failed, BUDGET_EXHAUSTED: not tried again
CANCELLED             the user cancelled              cancelled
CANCELLED             this process ends               released
CANCELLED             the lease is lost               nothing: it is no longer ours to say
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from aijobs.harness import CancellationReason, RunContext, RunState
from services.executor.leases import StopReason
from services.executor.outcomes import Abandoned, Cancelled, Failed, Outcome, Released, Succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """What a reason to stop is for the harness, and what is reported of it."""

    reason: CancellationReason
    outcome: Cancelled | Released | Abandoned


CANCELS: Mapping[StopReason, Cancel] = {
    StopReason.CANCEL_REQUESTED: Cancel(reason=CancellationReason.USER_REQUESTED, outcome=Cancelled()),
    StopReason.SHUTTING_DOWN: Cancel(
        reason=CancellationReason.INTERNAL_FAILURE, outcome=Released(reason="executor shutting down")
    ),
    StopReason.LEASE_LOST: Cancel(reason=CancellationReason.INTERNAL_FAILURE, outcome=Abandoned()),
}


def outcome_of(run: RunContext, detail: Succeeded | Failed, execution: int, stopped: StopReason | None) -> Outcome:
    """Say what is reported of an execution.

    Args:
        run: of the harness; it has ended.
        detail: what became of the execution's work.
        execution: its number.
        stopped: why the job's run has to stop; None: it goes on.

    """
    termination = run.lifecycle.termination
    state = run.lifecycle.state
    match state:
        case RunState.SUCCESS | RunState.FAILED:
            return detail
        case RunState.TIMED_OUT:
            return Failed(execution=execution, code="TIMEOUT", internal=f"not done by {run.deadline.isoformat()}")
        case RunState.BUDGET_EXHAUSTED:
            return Failed(
                execution=execution, code="BUDGET_EXHAUSTED", internal=termination.detail if termination else ""
            )
        case RunState.CANCELLED if stopped is not None:
            return CANCELS[stopped].outcome
        case RunState.CANCELLED | RunState.RUNNING:
            # Somebody's code has cancelled the run itself, or the harness has a gap.
            return Failed(execution=execution, code="INTERNAL_RUN_CANCELLED", internal=f"the run is {state}")
        case never:
            assert_never(never)
