"""The port to a place where the code of a job type runs, for one execution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aijobs.harness import Harness, RunContext
from aijobs.job_type import EarlierError, ModelGateway
from services.executor.outcomes import FollowUpJob, ProjectedArtifact, ProjectedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an execution is told about itself, as plain values."""

    job_id: str
    job_type: str
    user_id: str
    attempt: int
    execution: int
    depth: int
    earlier_errors: Sequence[EarlierError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What an execution works with: the run that bounds it, models, and somebody who hears of its progress."""

    run: RunContext
    harness: Harness
    models: ModelGateway
    progress: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A validated output as RFC 8785 text, and the SHA-256 of that text in hex (EX-5)."""

    text: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """What a projector made of the output."""

    artifacts: Sequence[ProjectedArtifact]
    follow_ups: Sequence[FollowUpJob] = ()
    rows: Sequence[ProjectedRow] = ()


class Host(Protocol):
    """Runs the code of one execution, step after step. A step that is cancelled leaves nothing running for long."""

    async def read_input(self, snapshot_json: str) -> None:
        """Validate the snapshot; the input stays here.

        Raises:
            ExecutionFailed: `INTERNAL_SNAPSHOT_INVALID`.
            HandlerExit: the code ended in a way of its own.

        """
        ...

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Call the handler and validate what it returns; the output stays here, too.

        Raises:
            ExecutionFailed: `VALIDATION_OUTPUT`, `INTERNAL_HANDLER_ERROR`, or what the handler raised.
            HandlerExit: the code ended in a way of its own.

        """
        ...

    async def project(self, facts: Facts) -> Projected:
        """Call the projector, if there is one.

        Raises:
            ExecutionFailed: `INTERNAL_PROJECTOR_ERROR`.
            HandlerExit: the code ended in a way of its own.

        """
        ...

    async def close(self) -> None:
        """End whatever is left of the execution."""
        ...
