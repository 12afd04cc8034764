"""From outbox events to broker messages (OB-9)."""

import json
from collections.abc import Callable
from datetime import UTC, datetime

from aijobs.broker.port import Message
from aijobs.v1.outbox_service_pb2 import OutboxEvent


class UnusableEvent(Exception):
    """An event that no message can be made of: its own fault, so it uses up its attempts (OB-4)."""


def enqueue(event: OutboxEvent) -> Message:
    """Build the message that makes an executor take a job: ids, and nothing that a user wrote."""
    payload = json.loads(event.payload_json)
    created = event.create_time.ToDatetime(tzinfo=UTC)
    body = {
        "jobId": payload["jobId"],
        "jobType": payload["jobType"],
        "idempotencyKey": event.dedupe_key,
        "createdAt": _iso(created),
    }
    return _message(event, json.dumps(body, separators=(",", ":")), queue=payload["queueName"])


def ended(event: OutboxEvent) -> Message:
    """Build the message that tells other backends of a job's end: the event's payload as it is (OB-8)."""
    json.loads(event.payload_json)
    return _message(event, event.payload_json, queue=None)


#: Every event type that this version can send. Others are left for newer dispatchers (ruling 21).
SENDABLE: dict[str, Callable[[OutboxEvent], Message]] = {
    "ai.job.enqueue": enqueue,
    "ai.job.completed": ended,
    "ai.job.failed": ended,
    "ai.job.cancelled": ended,
}


def to_message(event: OutboxEvent) -> Message:
    """Build the message of an event.

    Raises:
        UnusableEvent: unknown type, or a payload without what the message needs.

    """
    try:
        return SENDABLE[event.event_type](event)
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableEvent(f"event {event.event_id} of type {event.event_type}: {type(error).__name__}") from error


def _message(event: OutboxEvent, body: str, *, queue: str | None) -> Message:
    return Message(
        queue=queue,
        topic=event.event_type,
        message_id=event.event_id,
        correlation_id=event.aggregate_id,
        body=body.encode(),
    )


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")
