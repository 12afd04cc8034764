"""Between protobuf messages and the values that the use cases work with."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import JsonValue

from aijobs import canonical
from aijobs.errors import AijobsError, InvalidInput, NotAttempted, PayloadTooLarge
from aijobs.identifiers import LONGEST, is_identifier, rule
from aijobs.states import JobState
from aijobs.v1 import job_pb2, job_service_pb2, lifecycle_service_pb2
from services.jobs.admission import LARGEST_INPUT
from services.jobs.queries import JobDetail
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow

MessageT = TypeVar("MessageT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT")

MOST_ITEMS = 100
LONGEST_REASON = 256
SHORTEST_TOKEN, LONGEST_TOKEN = 16, 64
NANOSECONDS = 10**9
#: Beyond every span that is allowed anywhere, and still a timedelta.
LONGEST_SPAN = 10**9

STATES = {
    JobState.QUEUED: job_pb2.JOB_STATE_QUEUED,
    JobState.RUNNING: job_pb2.JOB_STATE_RUNNING,
    JobState.SUCCEEDED: job_pb2.JOB_STATE_SUCCEEDED,
    JobState.FAILED: job_pb2.JOB_STATE_FAILED,
    JobState.CANCELLED: job_pb2.JOB_STATE_CANCELLED,
}
STATES_BACK = {number: state for state, number in STATES.items()}


def identifier(field: str, value: str, *, most: int = LONGEST) -> str:
    """Return an id as it came.

    Raises:
        InvalidInput: it is not 1 to `most` printable ASCII characters.

    """
    if not is_identifier(value, most=most):
        raise InvalidInput.field(field, rule(most=most))
    return value


def optional_identifier(field: str, value: str, *, most: int = LONGEST) -> str:
    """Return an id as it came, or the empty text that stands for none.

    Raises:
        InvalidInput: it is not 1 to `most` printable ASCII characters.

    """
    return identifier(field, value, most=most) if value else ""


def reason(field: str, value: str, *, most: int = LONGEST_REASON) -> str:
    """Return a caller's words as they came.

    Raises:
        InvalidInput: they are too long or hold a NUL.

    """
    if len(value) > most or "\x00" in value:
        raise InvalidInput.field(field, f"at most {most} characters, none of them NUL")
    return value


def token(field: str, value: str) -> str:
    """Return a lease or claim token as it came.

    Raises:
        InvalidInput: it is not 16 to 64 printable ASCII characters.

    """
    if not is_identifier(value, least=SHORTEST_TOKEN, most=LONGEST_TOKEN):
        raise InvalidInput.field(field, rule(least=SHORTEST_TOKEN, most=LONGEST_TOKEN))
    return value


def span(field: str, message: Duration, *, most: timedelta) -> timedelta:
    """Return a span of time.

    Raises:
        InvalidInput: it is negative, longer than `most`, or no valid Duration.

    """
    if message.seconds >= 0 and 0 <= message.nanos < NANOSECONDS:
        value = timedelta(seconds=min(message.seconds, LONGEST_SPAN), microseconds=message.nanos // 1000)
        if value <= most:
            return value
    raise InvalidInput.field(field, f"must be from 0 to {most.total_seconds():g} seconds")


def moment(field: str, message: Timestamp) -> datetime:
    """Return a time.

    Raises:
        InvalidInput: it is no valid Timestamp.

    """
    try:
        return message.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidInput.field(field, "no time from the year 1 to 9999") from error


def count(field: str, value: int, *, most: int = 2**31 - 1) -> int:
    """Return a number of things.

    Raises:
        InvalidInput: it is negative or larger than `most`.

    """
    if not 0 <= value <= most:
        raise InvalidInput.field(field, f"must be from 0 to {most}")
    return value


def payload_size(request: job_service_pb2.CreateJobRequest) -> int:
    """Return the size of a create request's input as it was sent, in bytes."""
    if request.WhichOneof("payload") == "input_json":
        return len(request.input_json.encode())
    return request.input.ByteSize()


def payload(request: job_service_pb2.CreateJobRequest) -> JsonValue:
    """Return the input of a create request as JSON, from whichever form it came in.

    Raises:
        InvalidInput: it is missing or not strict JSON.
        PayloadTooLarge: it is over 1 MiB.

    """
    form = request.WhichOneof("payload")
    if form is None:
        raise InvalidInput.field("input", "missing: send `input` or `input_json`")
    if (size := payload_size(request)) > LARGEST_INPUT:
        raise PayloadTooLarge.field(form, f"{size} bytes; at most {LARGEST_INPUT}")
    try:
        if form == "input_json":
            return canonical.parse(request.input_json)
        value: JsonValue = MessageToDict(request.input)
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, canonical.NotStrictJson) else "not JSON: NaN, infinite or too deep"
        raise InvalidInput.field(form, problem) from error
    return value


class Batch(Generic[ItemT]):
    """A batch of messages: what can be read of them, and the answers put back at their places.

    Items that cannot be read, and those beyond the limit, are answered by themselves and disturb nobody.
    """

    def __init__(self, messages: Iterable[MessageT], read: Callable[[MessageT], ItemT]) -> None:
        self.good: list[ItemT] = []
        self._bad: dict[int, AijobsError] = {}
        self._size = 0
        for index, message in enumerate(messages):
            self._size += 1
            try:
                if index >= MOST_ITEMS:
                    raise NotAttempted(f"more than {MOST_ITEMS} items in one call")
                self.good.append(read(message))
            except AijobsError as error:
                self._bad[index] = error

    def answers(
        self,
        results: Sequence[ResultT | AijobsError],
        *,
        accepted: Callable[[ResultT], AnswerT],
        refused: Callable[[lifecycle_service_pb2.ItemError], AnswerT],
    ) -> list[AnswerT]:
        """Return an answer for every message that came in, in order.

        Args:
            results: what became of the good ones, in their order.
            accepted: makes the answer from a result.
            refused: makes the answer from an error.

        """
        rest = iter(results)
        every = [self._bad[index] if index in self._bad else next(rest) for index in range(self._size)]
        return [
            refused(lifecycle_service_pb2.ItemError(reason=result.reason, message=result.message))
            if isinstance(result, AijobsError)
            else accepted(result)
            for result in every
        ]


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
    message.follow_up_job_ids.extend(detail.follow_up_job_ids)
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
        run_at=timestamp(row.run_at),
        takeover_count=row.takeover_count,
        retry_of=row.retry_of or "",
        root_job_id=row.root_job_id or row.job_id,
        parent_job_id=row.parent_job_id or "",
        depth=row.depth,
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
