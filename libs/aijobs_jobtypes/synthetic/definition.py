"""Definition of the synthetic job. Without input it is a no-op, as fast as a job can be."""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema

#: The engine hands over at most so many earlier errors, so more failures than these cannot be counted.
MOST_COUNTED_FAILURES = 5
Milliseconds = Annotated[int, Field(ge=0, le=600_000)]


class SyntheticInput(BaseModel):
    """What an execution does, in this order: sleep, block, kill, fail, answer."""

    model_config = ConfigDict(extra="forbid")

    sleep_ms: Annotated[Milliseconds, Field(description="Sleep, giving way to others.")] = 0
    progress_steps: Annotated[int, Field(ge=0, le=100, description="Progress reports, spread over the sleep.")] = 0
    cancellation: Annotated[
        Literal["honour", "ignore"],
        Field(description="`ignore` swallows every cancellation until the sleep is over, as bad code would."),
    ] = "honour"
    block_ms: Annotated[int, Field(ge=0, le=60_000, description="Block the thread, with the event loop on it.")] = 0
    kill: Annotated[bool, Field(description="Kill the executor's own process with SIGKILL.")] = False
    kill_attempts: Annotated[int, Field(ge=1, le=100, description="Kill on attempts up to this one only.")] = 1
    fail_times: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_COUNTED_FAILURES,
            description="Fail so many executions of the job first. 5 is more than may be tried again: always.",
        ),
    ] = 0
    fail_code: Annotated[
        str, Field(pattern=r"^[A-Z][A-Z0-9_]{1,63}$", description="Code of the failure taxonomy to fail with.")
    ] = "PROVIDER_UNAVAILABLE"
    output_bytes: Annotated[int, Field(ge=0, le=2_000_000, description="Padding of the output.")] = 0
    echo: Annotated[JsonValue, Field(description="Comes back in the output.")] = None


class SyntheticOutput(BaseModel):
    """What an execution returns."""

    echo: JsonValue = None
    executions: Annotated[int, Field(ge=1, description="Executions of the job, this one counted.")]
    padding: str = ""


DEFINITION = JobDefinition(
    job_type="synthetic",
    metadata=Metadata(
        label="Synthetic",
        description="Sleeps, fails, blocks or kills its process as its input says; for tests and benchmarks.",
        domain="maintenance",
        version="1.0.0",
    ),
    routing=Routing(queue=Queue.INTERACTIVE),
    execution=Execution(
        timeout=timedelta(seconds=60),
        max_retries=MOST_COUNTED_FAILURES - 1,
        backoff=timedelta(milliseconds=100),
    ),
    input=Schema(version="1", model=SyntheticInput),
    output=Schema(version="1", model=SyntheticOutput),
    executor="aijobs_jobtypes.synthetic.executor:execute",
    projector="aijobs_jobtypes.synthetic.projector:project",
)
