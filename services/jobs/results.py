"""What a result must be to be stored: it is given back, and checked against its hash, exactly as it was sent (EX-5)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from aijobs import canonical
from aijobs.errors import AijobsError, FieldViolation, InvalidInput
from aijobs.identifiers import is_identifier, rule
from services.jobs.store.contents import ArtifactRow

#: Output and projection of one job together.
LARGEST_RESULT = 2 * 1024 * 1024
MOST_ARTIFACTS = 200
LONGEST_ARTIFACT_TYPE = 64
HIGHEST_ORDINAL = 2**31 - 1
#: Results above this are checked in a thread, so that nobody's heartbeat waits for them.
LARGE_RESULT = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """A job that a result calls for."""

    job_type: str
    input_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BusinessRow:
    """A row that a result calls for."""

    writer: str
    content_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """A run has a validated output."""

    output_json: str
    output_hash: str
    artifacts: Sequence[ArtifactRow]
    follow_ups: Sequence[FollowUp] = ()
    rows: Sequence[BusinessRow] = ()


async def problem_of(job_id: str, result: Succeeded) -> AijobsError | None:
    """Return why a result cannot be stored; None: it can. A large one is checked beside the event loop."""
    try:
        if sum(map(len, _texts(result))) <= LARGE_RESULT:
            _check(job_id, result)
        else:
            await asyncio.to_thread(_check, job_id, result)
    except AijobsError as error:
        return error
    return None


async def parsed(text: str) -> JsonValue:
    """Read strict JSON; a large one beside the event loop.

    Raises:
        NotStrictJson: it is none.

    """
    if len(text) <= LARGE_RESULT:
        return canonical.parse(text)
    return await asyncio.to_thread(canonical.parse, text)


def _check(job_id: str, report: Succeeded) -> None:
    """Refuse a result that could not be given back as it was hashed, or that would break a constraint."""
    size = sum(len(text.encode()) for text in _texts(report))
    if size > LARGEST_RESULT:
        raise InvalidInput.field("succeeded", f"output and projection are {size} bytes; at most {LARGEST_RESULT}")
    problems: list[FieldViolation] = []
    try:
        if canonical.dump(canonical.parse(report.output_json)) != report.output_json:
            problems.append(FieldViolation("succeeded.output_json", "not in RFC 8785 canonical form"))
    except canonical.NotStrictJson as error:
        problems.append(FieldViolation("succeeded.output_json", str(error)))
    if canonical.digest(report.output_json) != report.output_hash:
        problems.append(FieldViolation("succeeded.output_hash", "not the SHA-256 of output_json"))
    problems += artifact_violations(job_id, report.artifacts)
    if problems:
        raise InvalidInput.fields(problems)


def _texts(result: Succeeded) -> list[str]:
    return [
        result.output_json,
        *(artifact.content_json or "" for artifact in result.artifacts),
        *(follow_up.input_json for follow_up in result.follow_ups),
        *(row.content_json for row in result.rows),
    ]


def artifact_violations(job_id: str, artifacts: Sequence[ArtifactRow]) -> list[FieldViolation]:
    """Return what of a job's artifacts would break a constraint or could not be given back."""
    if len(artifacts) > MOST_ARTIFACTS:
        return [FieldViolation("succeeded.projection.artifacts", f"{len(artifacts)}; at most {MOST_ARTIFACTS}")]
    problems: list[FieldViolation] = []
    seen: set[tuple[str, object]] = set()
    for index, artifact in enumerate(artifacts):
        field = f"succeeded.projection.artifacts[{index}]"
        if artifact.job_id != job_id:
            problems.append(FieldViolation(field, "belongs to another job"))
        if not is_identifier(artifact.artifact_type, most=LONGEST_ARTIFACT_TYPE):
            problems.append(FieldViolation(f"{field}.type", rule(most=LONGEST_ARTIFACT_TYPE)))
        if not is_identifier(artifact.artifact_id):
            problems.append(FieldViolation(f"{field}.id", rule()))
        if not 0 <= artifact.ordinal <= HIGHEST_ORDINAL:
            problems.append(FieldViolation(f"{field}.ordinal", "must not be negative"))
        for part in (artifact.artifact_id, artifact.ordinal):
            if (artifact.artifact_type, part) in seen:
                problems.append(FieldViolation(field, f"{artifact.artifact_type} {part} twice"))
            seen.add((artifact.artifact_type, part))
        try:
            canonical.parse(artifact.content_json or "")
        except canonical.NotStrictJson as error:
            problems.append(FieldViolation(f"{field}.content_json", str(error)))
    return problems
