"""What everybody who works for a run is handed, explicitly (HA-1)."""

from dataclasses import dataclass
from datetime import datetime

from aijobs.harness.budget import RunBudget
from aijobs.harness.cancellation import RunCancellation
from aijobs.harness.lifecycle import RunLifecycle
from aijobs.harness.retry import RetryPolicies


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run. The structure never changes; its parts are the shared state of everybody who works for the run.

    Hand on the object itself: a copy with other parts would be another run.

    Attributes:
        session_id: what the run belongs to; for a job, its root job.
        run_id: the run; for an execution of a job, `<job id>.<attempt>.<execution>` (HA-8).
        deadline: aware; at this moment the run is over.

    """

    session_id: str
    run_id: str
    deadline: datetime
    cancellation: RunCancellation
    budget: RunBudget
    retry_policies: RetryPolicies
    lifecycle: RunLifecycle
