"""What a test of a handler hands to it, without any service running."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel

from aijobs.definition import Budget
from aijobs.harness import Harness, RetryPolicies
from aijobs.job_type import EarlierError, ExecutionContext, ModelGateway, ProgressReport

InputT = TypeVar("InputT", bound=BaseModel)
LONGEST = timedelta(minutes=5)


def make_context(
    value: InputT,
    *,
    models: ModelGateway,
    job_type: str = "testing",
    attempt: int = 1,
    execution: int = 1,
    progress: ProgressReport = lambda _: None,
    earlier_errors: Sequence[EarlierError] = (),
    budget: Budget | None = None,
) -> ExecutionContext[InputT]:
    """Make the context of one execution, with a run of the harness that has just begun.

    Args:
        value: the job's input.
        models: answers the handler's model calls; it counts them itself, if at all.
        job_type: name of the job's type.
        attempt: number of the attempt.
        execution: number of the execution within the attempt.
        progress: is told what the handler reports.
        earlier_errors: of failed executions before.
        budget: of the execution; the default one if None.

    """
    harness = Harness(
        clock=lambda: datetime.now(UTC),
        make_run_id=lambda: f"job-1.{attempt}.{execution}",
        longest_run=LONGEST,
        limits=(budget or Budget()).limits(),
        retry_policies=RetryPolicies.strict(),
    )
    return ExecutionContext(
        job_id="job-1",
        job_type=job_type,
        user_id="user-1",
        attempt=attempt,
        execution=execution,
        input=value,
        models=models,
        progress=progress,
        earlier_errors=earlier_errors,
        run=harness.start("job-1"),
        harness=harness,
    )
