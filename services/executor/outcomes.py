"""How an execution can end: a closed set, each with exactly one report to the jobs service."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from aijobs.failures import ExecutionFailed

LONGEST_INTERNAL = 2000
LONGEST_FEEDBACK = 4000
#: No run lasts that long, so a longer wait is as good as this one.
LONGEST_RETRY_AFTER = timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedArtifact:
    """An artifact whose content is canonical JSON text."""

    type: str
    artifact_id: str
    ordinal: int
    content_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpJob:
    """A job that the result calls for; its input is canonical JSON text."""

    job_type: str
    input_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedRow:
    """A business row whose content is canonical JSON text."""

    writer: str
    content_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """There is a validated output and its projection. Reported as succeeded."""

    output_json: str
    output_hash: str
    artifacts: Sequence[ProjectedArtifact] = ()
    follow_ups: Sequence[FollowUpJob] = ()
    rows: Sequence[ProjectedRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One execution failed. Reported as failed; the answer says whether another one follows."""

    execution: int
    code: str
    internal: str
    feedback: str = ""
    retry_after: timedelta = timedelta(0)

    @classmethod
    def of(cls, execution: int, failure: ExecutionFailed) -> Self:
        """Make a report of what a handler raised; whatever its texts hold, the report can be sent."""
        return cls(
            execution=execution,
            code=failure.code,
            internal=_sendable(failure.internal, LONGEST_INTERNAL),
            feedback=_sendable(failure.feedback, LONGEST_FEEDBACK),
            retry_after=min(failure.retry_after or timedelta(0), LONGEST_RETRY_AFTER),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The run stopped because somebody cancelled the job. Reported as cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The run goes to somebody else, or waits longer than a slot is held for. Reported as released (EX-10)."""

    reason: str
    delay: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The lease is lost. Not reported: it is no longer ours to say."""


#: What is told to the jobs service.
Report = Succeeded | Failed | Cancelled | Released
Outcome = Report | Abandoned


def _sendable(text: str, longest: int) -> str:
    return text.replace("\x00", "")[:longest].encode(errors="replace").decode()
