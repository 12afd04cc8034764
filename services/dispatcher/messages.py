"""From outbox events to broker messages (OB-9)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from aijobs.broker.port import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedEvent:
    """An outbox event in the hands of this dispatcher."""

    event_id: str
    event_type: str
    aggregate_id: str
    dedupe_key: str
    payload_json: str
    created_at: datetime
    trace_context: str | None = None


class UnusableEvent(Exception):
    """An event that no message can be made of: its own fault, so it uses up its attempts (OB-4)."""


def enqueue(event: ClaimedEvent) -> Message:
    """Build the message that makes an executor take a job: ids, and nothing that a user wrote."""
    payload = json.loads(event.payload_json)
    body = {
        "jobId": payload["jobId"],
        "jobType": payload["jobType"],
        "idempotencyKey": event.dedupe_key,
        "createdAt": event.created_at.isoformat(timespec="microseconds"),
    }
    return _message(event, json.dumps(body, separators=(",", ":")), queue=payload["queueName"])


def ended(event: ClaimedEvent) -> Message:
    """Build the message that tells other backends of a job's end: the event's payload as it is (OB-8)."""
    json.loads(event.payload_json)
    return _message(event, event.payload_json, queue=None)


#: Every event type that this version can send. Others are left for newer dispatchers (ruling 21).
SENDABLE: dict[str, Callable[[ClaimedEvent], Message]] = {
    "ai.job.enqueue": enqueue,
    "ai.job.completed": ended,
    "ai.job.failed": ended,
    "ai.job.cancelled": ended,
}


def to_message(event: ClaimedEvent) -> Message:
    """Build the message of an event.

    Raises:
        UnusableEvent: unknown type, or a payload without what the message needs.

    """
    try:
        return SENDABLE[event.event_type](event)
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableEvent(f"event {event.event_id} of type {event.event_type}: {type(error).__name__}") from error


def _message(event: ClaimedEvent, body: str, *, queue: str | None) -> Message:
    return Message(
        queue=queue,
        topic=event.event_type,
        message_id=event.event_id,
        correlation_id=event.aggregate_id,
        body=body.encode(),
        trace_context=event.trace_context or "",
    )
