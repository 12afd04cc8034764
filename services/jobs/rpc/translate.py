"""Between protobuf messages and the values that the use cases work with."""

import json
from datetime import datetime, timedelta
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import JsonValue

from aijobs import canonical
from aijobs.errors import AijobsError, FieldViolation, InvalidInput, NotAttempted, PayloadTooLarge
from aijobs.states import JobState
from aijobs.v1 import job_pb2, job_service_pb2, lifecycle_service_pb2
from services.jobs.creation import IDENTIFIER, LARGEST_INPUT
from services.jobs.queries import JobDetail
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow

ItemT = TypeVar("ItemT")

MOST_ITEMS = 100
LONGEST_REASON = 256

STATES = {
    JobState.QUEUED: job_pb2.JOB_STATE_QUEUED,
    JobState.RUNNING: job_pb2.JOB_STATE_RUNNING,
    JobState.SUCCEEDED: job_pb2.JOB_STATE_SUCCEEDED,
    JobState.FAILED: job_pb2.JOB_STATE_FAILED,
    JobState.CANCELLED: job_pb2.JOB_STATE_CANCELLED,
}
STATES_BACK = {number: state for state, number in STATES.items()}


def identifier(field: str, value: str) -> str:
    """Return an id as it came.

    Raises:
        InvalidInput: it is not 1 to 128 printable ASCII characters.

    """
    if not IDENTIFIER.fullmatch(value):
        raise InvalidInput.field(field, "must be 1 to 128 printable ASCII characters without blanks")
    return value


def optional_identifier(field: str, value: str) -> str:
    """Return an id as it came, or the empty text that stands for none.

    Raises:
        InvalidInput: it is not 1 to 128 printable ASCII characters.

    """
    return identifier(field, value) if value else ""


def reason(field: str, value: str) -> str:
    """Return a caller's words as they came.

    Raises:
        InvalidInput: they are too long or hold a NUL.

    """
    if len(value) > LONGEST_REASON or "\x00" in value:
        raise InvalidInput.field(field, f"at most {LONGEST_REASON} characters, none of them NUL")
    return value


def token(field: str, value: str) -> str:
    """Return a lease or claim token as it came.

    Raises:
        InvalidInput: it is not 16 to 64 printable ASCII characters.

    """
    if not (IDENTIFIER.fullmatch(value) and 16 <= len(value) <= 64):  # noqa: PLR2004 - the bounds of the contract
        raise InvalidInput.field(field, "must be 16 to 64 printable ASCII characters without blanks")
    return value


def payload(request: job_service_pb2.CreateJobRequest) -> JsonValue:
    """Return the input of a create request as JSON, from whichever form it came in.

    Raises:
        InvalidInput: it is missing or not strict JSON.
        PayloadTooLarge: it is over 1 MiB.

    """
    match request.WhichOneof("payload"):
        case "input_json":
            size = len(request.input_json.encode())
        case "input":
            size = request.input.ByteSize()
        case _:
            raise InvalidInput.field("input", "missing: send `input` or `input_json`")
    if size > LARGEST_INPUT:
        description = f"{size} bytes; at most {LARGEST_INPUT}"
        raise PayloadTooLarge(f"input: {description}", violations=[FieldViolation("input", description)])
    if request.WhichOneof("payload") == "input":
        value: JsonValue = MessageToDict(request.input)
        return value
    try:
        return canonical.parse(request.input_json)
    except canonical.NotStrictJson as error:
        raise InvalidInput.field("input_json", str(error)) from error


def fitting(items: list[ItemT]) -> tuple[list[ItemT], list[NotAttempted]]:
    """Split a batch into what fits and an error for each item that does not."""
    left = [NotAttempted(f"more than {MOST_ITEMS} items in one call")] * max(0, len(items) - MOST_ITEMS)
    return items[:MOST_ITEMS], left


def item_error(error: AijobsError) -> lifecycle_service_pb2.ItemError:
    """Translate the refusal of one item."""
    return lifecycle_service_pb2.ItemError(reason=error.reason, message=error.message)


def timestamp(moment: datetime | None) -> Timestamp | None:
    """Translate a time."""
    if moment is None:
        return None
    message = Timestamp()
    message.FromDatetime(moment)
    return message


def duration(span: timedelta) -> Duration:
    """Translate a span."""
    message = Duration()
    message.FromTimedelta(span)
    return message


def job(detail: JobDetail) -> job_pb2.Job:
    """Translate a job with whatever was read of it."""
    row = detail.job
    message = row_only(row)
    message.artifacts.extend(
        job_pb2.Artifact(
            type=artifact.artifact_type,
            id=artifact.artifact_id,
            ordinal=artifact.ordinal,
            content_json=artifact.content_json or "",
        )
        for artifact in detail.artifacts
    )
    message.output_json = detail.output_json or ""
    message.usage.CopyFrom(
        job_pb2.UsageTotals(
            calls=detail.usage.calls,
            input_tokens=detail.usage.input_tokens,
            output_tokens=detail.usage.output_tokens,
        )
    )
    return message


def row_only(row: JobRow) -> job_pb2.Job:
    """Translate a job's row."""
    return job_pb2.Job(
        job_id=row.job_id,
        job_type=row.job_type,
        state=STATES[row.lifecycle_status],
        user_id=row.user_id,
        target=job_pb2.Target(type=row.target_type, id=row.target_id) if row.target_type else None,
        queue=row.queue,
        priority=row.priority,
        progress=row.progress,
        labels=json.loads(row.labels_json),
        idempotency_key=row.idempotency_key or "",
        attempt=row.attempt,
        retry_count=row.retry_count,
        max_retries=row.max_retries,
        create_time=timestamp(row.created_at),
        start_time=timestamp(row.started_at),
        finish_time=timestamp(row.finished_at),
        cancel_request_time=timestamp(row.cancel_requested_at),
        error=job_pb2.JobError(code=row.error_code, message=row.error_public or "") if row.error_code else None,
        artifact_count=row.artifact_count,
        output_hash=row.output_hash or "",
        sequence=row.sequence,
    )


def transition(entry: HistoryRow) -> job_pb2.Transition:
    """Translate a history entry."""
    return job_pb2.Transition(
        sequence=entry.sequence,
        kind=entry.kind,
        from_state=STATES[JobState(entry.from_state)] if entry.from_state else job_pb2.JOB_STATE_UNSPECIFIED,
        to_state=STATES[JobState(entry.to_state)],
        attempt=entry.attempt,
        actor=entry.actor,
        reason=entry.reason,
        time=timestamp(entry.at),
    )
