"""The events that leave through the outbox, written in the transaction of the change they tell of (OB-1, OB-8).

Payloads hold ids and codes, never a user id and nothing that a user or a model wrote.
"""

import json
from dataclasses import replace
from enum import StrEnum

from uuid_utils import uuid7

from aijobs.completion import ROUTING_KEYS, CompletionEvent
from aijobs.states import JobState
from services.jobs.store.jobs import JobRow
from services.jobs.store.outbox import NewEvent

AGGREGATE_TYPE = "AiJob"


class EventType(StrEnum):
    """Every type of event."""

    ENQUEUE = "ai.job.enqueue"
    COMPLETED = "ai.job.completed"
    FAILED = "ai.job.failed"
    CANCELLED = "ai.job.cancelled"


END_EVENTS = {state: EventType(key) for state, key in ROUTING_KEYS.items()}


def _enqueue(job: JobRow) -> NewEvent:
    """Build the event that makes an executor run the job. Its payload is exactly these four fields (OB-1).

    The row's dispatch number names the event. It stands where the job stands, and is scheduled until the job is due; a
    job that never was due has no place yet, even if its time has come in this very moment.
    """
    payload = {"jobId": job.job_id, "jobType": job.job_type, "queueName": job.queue, "priority": job.priority}
    event = _event(EventType.ENQUEUE, job, json.dumps(payload, separators=(",", ":")), str(uuid7()))
    waits = job.rank_at is None or not job.due
    return replace(
        event, queue=job.queue, rank_at=job.rank_at, available_at=(job.due_at or job.read_at) if waits else None
    )


def dispatch_key(job_id: str, dispatch_no: int) -> str:
    """Return the dedupe key of a job's enqueue event (ruling 20)."""
    return _key(EventType.ENQUEUE, job_id, dispatch_no)


def end_key(job_id: str, state: JobState, dispatch_no: int) -> str:
    """Return the dedupe key of the event that tells of a job's end."""
    return _key(END_EVENTS[state], job_id, dispatch_no)


def leads_anywhere(dedupe_key: str, job: JobRow | None) -> bool:
    """Tell whether an event is still of use: what tells of an end always is, a dispatch while its job waits for it."""
    if not dedupe_key.startswith(f"{EventType.ENQUEUE}:"):
        return True
    return job is not None and job.waits and dedupe_key == dispatch_key(job.job_id, job.dispatch_no)


def of(job: JobRow) -> NewEvent | None:
    """Build the event that a change calls for, from the row after it.

    An end is told, a job that waits is dispatched, and of one that is leased nobody has to hear.
    """
    if job.lifecycle_status.terminal:
        return _of_end(job)
    return _enqueue(job) if job.waits else None


def _of_end(job: JobRow) -> NewEvent:
    """Build the event that tells other backends that a job has ended, through the model that they read it with."""
    event = CompletionEvent.model_validate(
        {
            "event_id": str(uuid7()),
            "job_id": job.job_id,
            "job_type": job.job_type,
            "state": job.lifecycle_status,
            "error_code": job.error_code,
            "output_hash": job.output_hash,
            "sequence": job.sequence,
            "occurred_at": job.finished_at or job.read_at,
        }
    )
    return _event(END_EVENTS[event.state], job, event.body(), event.event_id)


def _event(event_type: EventType, job: JobRow, payload_json: str, event_id: str) -> NewEvent:
    return NewEvent(
        event_id=event_id,
        event_type=event_type,
        aggregate_type=AGGREGATE_TYPE,
        aggregate_id=job.job_id,
        dedupe_key=_key(event_type, job.job_id, job.dispatch_no),
        payload_json=payload_json,
        trace_context=job.trace_context,
    )


def _key(event_type: EventType, job_id: str, dispatch_no: int) -> str:
    return f"{event_type}:{job_id}:{dispatch_no}"
