"""What authors of job types write against: an executor, a projector, and what the engine hands them.

    async def execute(context: ExecutionContext[MyInput]) -> MyOutput: ...       # or, in a thread of its own:
    def execute(context: BlockingExecutionContext[MyInput]) -> MyOutput: ...
    def project(job: ProjectedJob, output: MyOutput) -> Projection: ...

The executor does the work of one execution and may be run again, even while an earlier one is still dying: its only
effect is what it returns. The projector turns a validated output into artifacts; it is pure (PJ-1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, Protocol, TypeVar
from uuid import NAMESPACE_URL, uuid5

from pydantic import BaseModel, JsonValue

from aijobs.canonical import JsonObject
from aijobs.harness import Harness, RunContext

#: A chain has at most so many jobs after its first.
DEEPEST = 5
InputT_co = TypeVar("InputT_co", bound=BaseModel, covariant=True)


class ModelTier(StrEnum):
    """How capable, and how costly, a model a request wants. Settings say which model serves a tier (EX-7)."""

    PRIMARY = "primary"
    STRONG = "strong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation with a model."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One question to a model whose answer must be a JSON object that fits `output_schema` (JSON Schema 2020-12)."""

    messages: Sequence[Message]
    output_schema: JsonObject
    tier: ModelTier = ModelTier.PRIMARY
    max_output_tokens: int = 4096
    temperature: float = 0.3
    prompt_key: str = ""
    prompt_version: str = ""


class ModelGateway(Protocol):
    """The way to models. Every call is one request on the wire, recorded in the usage ledger; it never retries."""

    async def generate_json(self, request: ModelRequest) -> JsonObject:
        """Ask a model, parse its answer (EX-8) and validate it against the request's schema.

        Raises:
            ExecutionFailed: `PROVIDER_*`, `VALIDATION_*` with feedback for the next prompt, `CREDENTIAL_*`.
            BudgetExceeded: the execution may make no such call, or has now used more than it may; it is over.
            RunOver: the execution is over: cancelled, timed out, or its handler goes on after its end.

        """
        ...


class BlockingModelGateway(Protocol):
    """The same for handlers that are no coroutines: they wait for the answer in their own thread."""

    def generate_json(self, request: ModelRequest) -> JsonObject:
        """Ask a model; see `ModelGateway`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierError:
    """A failed execution of the same job, to be fed back into the next prompt."""

    code: str
    feedback: str


class ProgressReport(Protocol):
    """Tells the engine how far an execution is."""

    def __call__(self, percent: float) -> None:
        """Report a percentage from 0 to 100; users see it, rounded, with the next heartbeat. Never blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context(Generic[InputT_co]):
    job_id: str
    job_type: str
    user_id: str
    #: Rises with every lock of the job; `execution` counts within an attempt, from 1.
    attempt: int
    execution: int
    input: InputT_co
    progress: ProgressReport
    #: What bounds this execution: its deadline, budget and cancellation (HA-8). Tools are called through the harness;
    #: model calls are counted by `models`.
    run: RunContext
    harness: Harness
    earlier_errors: Sequence[EarlierError] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionContext(_Context[InputT_co]):
    """What one execution works with. Passed explicitly, never ambient."""

    models: ModelGateway


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingExecutionContext(_Context[InputT_co]):
    """What one execution works with whose handler is no coroutine."""

    models: BlockingModelGateway


class Executor(Protocol):
    """Does the work of one execution of a job type, as a coroutine."""

    async def __call__(self, context: ExecutionContext[BaseModel]) -> BaseModel | JsonValue:
        """Return the output; the engine validates it against the definition's output model.

        Cancellation and timeout arrive as `asyncio.CancelledError` at an await: clean up and let it pass.

        Raises:
            ExecutionFailed: this execution failed; the taxonomy decides what follows. Anything else is
                `INTERNAL_HANDLER_ERROR`.

        """
        ...


class BlockingExecutor(Protocol):
    """Does the work of one execution of a job type as a plain function, in a thread of its own.

    Cancellation and timeout cannot stop a thread: its run goes on without it, and its next call of a model is refused.
    A long one looks at `context.run.cancellation.cancelled` now and then, or asks for `isolation="process"`.
    """

    def __call__(self, context: BlockingExecutionContext[BaseModel]) -> BaseModel | JsonValue:
        """Return the output, as `Executor` does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One thing that a job leaves behind. `artifact_id` is made by `artifact_id()`."""

    type: str
    artifact_id: str
    ordinal: int
    content: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """A job that the result calls for. It belongs to the same user, and no quota refuses it (PJ-3).

    Attributes:
        job_type: an installed one.
        input: what its definition takes.

    """

    job_type: str
    input: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class BusinessRow:
    """A row of a business table. The jobs service has a writer for each kind, which checks whose the row is (PJ-1).

    Attributes:
        writer: name of an installed writer.
        content: what it takes.

    """

    writer: str
    content: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Everything that is committed together with the success of a job (PJ-2)."""

    artifacts: Sequence[Artifact] = field(default=())
    follow_ups: Sequence[FollowUp] = field(default=())
    rows: Sequence[BusinessRow] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedJob:
    """What a projector may know about the job.

    `depth` counts the jobs before it in its chain of follow-up jobs. At `DEEPEST` it may call for no more of them.
    """

    job_id: str
    job_type: str
    user_id: str
    input: BaseModel
    depth: int = 0


class Projector(Protocol):
    """Maps a validated output to what the job leaves behind."""

    def __call__(self, job: ProjectedJob, output: BaseModel) -> Projection:
        """Return the projection. Pure: no I/O, no clock, no randomness, so that a repeat gives the same (PJ-1)."""
        ...


def artifact_id(job_id: str, artifact_type: str, ordinal: int) -> str:
    """Return the id of a job's artifact: a UUIDv5 (RFC 9562) of its three parts, the same in every repeat (PJ-1)."""
    return str(uuid5(NAMESPACE_URL, f"aijobs:{job_id}:{artifact_type}:{ordinal}"))
