"""What a job type is: an immutable definition, checked when it is built (RG-1, RG-2).

Executor and projector are named as `module:object` and loaded only by the executor service, so that the jobs service
never imports model SDKs or business code.
"""

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aijobs.harness import RunBudgetLimits

JOB_TYPE_PATTERN = r"^[a-z][a-z0-9_]{1,63}$"


class Queue(StrEnum):
    """The queues that executors consume."""

    INTERACTIVE = "ai-interactive"
    BACKGROUND = "ai-background"


class QueueDefaults(BaseModel):
    """What a queue gives a definition that says nothing itself, and how many runs one executor holds (QU-1)."""

    model_config = ConfigDict(frozen=True)

    concurrency: int
    attempts: int
    backoff: timedelta


QUEUE_DEFAULTS = {
    Queue.INTERACTIVE: QueueDefaults(concurrency=2, attempts=2, backoff=timedelta(seconds=2)),
    Queue.BACKGROUND: QueueDefaults(concurrency=1, attempts=3, backoff=timedelta(seconds=5)),
}


#: However often it has doubled, no wait between two executions is longer.
LONGEST_BACKOFF = timedelta(minutes=10)
#: What the whole run is granted for each execution that a dead host cost, besides the execution: the lease that has to
#: run out first, and a place in the queue.
SPARE_FOR_A_TAKEOVER = timedelta(minutes=2)
#: And for what is nobody's doing: a queue that is paused, a broker that is away, a line of others.
SPARE_FOR_THE_QUEUE = timedelta(minutes=30)
#: Times that a run is taken over unless the jobs service is told otherwise.
TAKEOVERS = 3


def wait_before_retry(backoff: timedelta, retry: int) -> timedelta:
    """Return the wait before retry number `retry`, from 1: it doubles each time, up to `LONGEST_BACKOFF`."""
    # Far beyond the longest wait already; a larger power would only overflow.
    doubled: int = 2 ** min(retry - 1, 20)
    return min(backoff * doubled, LONGEST_BACKOFF)


class CredentialMode(StrEnum):
    """Whose key pays for model calls."""

    PLATFORM_KEY = "platform_key"
    USER_DEEPSEEK_KEY = "user_deepseek_key"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Metadata(_Part):
    """For people and for lists."""

    label: Annotated[str, Field(min_length=1, max_length=100)]
    description: Annotated[str, Field(min_length=1, max_length=1000)]
    domain: Literal["analysis", "generation", "import", "maintenance"]
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]


class Routing(_Part):
    """Which queue, and how urgent. Priority 0 goes first, 100 last."""

    queue: Queue
    default_priority: Annotated[int, Field(ge=0, le=100)] = 50


class Execution(_Part):
    """How one execution is bounded and what follows when it fails.

    `timeout` is for one execution. `max_retries` does not count the first one; `backoff` doubles with each retry.
    Unset ones take the queue's defaults. `run_timeout` is for all executions of a run and the waits between them, from
    its first start; unset, it is what they can come to (EX-4). With `isolation` `process`, each execution gets a
    process of its own, for code that holds the interpreter or may crash (EX-11).
    """

    timeout: Annotated[timedelta, Field(ge=timedelta(seconds=1), le=timedelta(seconds=600))]
    max_retries: Annotated[int, Field(ge=0, le=20)] | None = None
    backoff: Annotated[timedelta, Field(ge=timedelta(0), le=timedelta(seconds=600))] | None = None
    run_timeout: Annotated[timedelta, Field(ge=timedelta(seconds=1), le=timedelta(days=7))] | None = None
    cancellable: bool = True
    abort_strategy: Literal["fail", "retry"] = "fail"
    isolation: Literal["shared", "process"] = "shared"


class Schema(_Part):
    """A versioned pydantic model; its JSON Schema is what callers see."""

    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    model: type[BaseModel]


class Credentials(_Part):
    """Which credential modes a job may use."""

    allowed: tuple[CredentialMode, ...] = (CredentialMode.PLATFORM_KEY,)
    default: CredentialMode = CredentialMode.PLATFORM_KEY

    @model_validator(mode="after")
    def _default_is_allowed(self) -> "Credentials":
        if self.default not in self.allowed:
            raise ValueError(f"default mode {self.default} is not among the allowed modes")
        return self


Limit = Annotated[int, Field(ge=1)]


class Budget(_Part):
    """What one execution may use (HA-5). Whoever wants more fails the job with `BUDGET_EXHAUSTED`."""

    model_calls: Limit = 20
    tool_calls: Limit = 100
    tool_calls_per_tool: Limit = 50
    input_tokens: Limit = 1_000_000
    output_tokens: Limit = 200_000
    total_tokens: Limit = 1_200_000
    run_bytes: Limit = 8 * 1024 * 1024

    def limits(self) -> RunBudgetLimits:
        """Return the limits as the harness takes them."""
        return RunBudgetLimits(**self.model_dump())


CodeReference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class JobDefinition(_Part):
    """Everything the engine knows about a job type.

    Raises:
        pydantic.ValidationError: when built with values out of bounds; it lists every violation at once.

    """

    job_type: Annotated[str, Field(pattern=JOB_TYPE_PATTERN)]
    metadata: Metadata
    routing: Routing
    execution: Execution
    input: Schema
    output: Schema
    executor: CodeReference
    projector: CodeReference | None = None
    credentials: Credentials = Credentials()
    budget: Budget = Budget()

    def filled(self, defaults: Mapping[Queue, QueueDefaults]) -> "JobDefinition":
        """Return the definition with its queue's retries and backoff written into it, where it names none (QU-1)."""
        own, queue = self.execution, defaults[self.routing.queue]
        return self.model_copy(
            update={
                "execution": own.model_copy(
                    update={
                        "max_retries": queue.attempts - 1 if own.max_retries is None else own.max_retries,
                        "backoff": queue.backoff if own.backoff is None else own.backoff,
                    }
                )
            }
        )

    @property
    def max_retries(self) -> int:
        """Failed executions that may be tried again."""
        own = self.execution.max_retries
        return QUEUE_DEFAULTS[self.routing.queue].attempts - 1 if own is None else own

    @property
    def backoff(self) -> timedelta:
        """Wait before the first retry; it doubles with each further one."""
        own = self.execution.backoff
        return QUEUE_DEFAULTS[self.routing.queue].backoff if own is None else own

    @property
    def run_timeout(self) -> timedelta:
        """All executions of a run and the waits between them; unless it is named, with some to spare (EX-4)."""
        if self.execution.run_timeout is not None:
            return self.execution.run_timeout
        waits = (wait_before_retry(self.backoff, retry) for retry in range(1, self.max_retries + 1))
        executions = self.execution.timeout * (self.max_retries + 1)
        spare = (self.execution.timeout + SPARE_FOR_A_TAKEOVER) * TAKEOVERS + SPARE_FOR_THE_QUEUE
        return sum(waits, executions) + spare
