"""Reading work messages, which may come from anybody who can reach the broker."""

from uuid import UUID

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aijobs import metrics
from aijobs.broker.port import LARGEST_BODY, Delivery

POISON = metrics.counter("poison_messages", "Messages put aside because nobody can read them", "queue", "reason")
log = structlog.get_logger()


class JobMessage(BaseModel):
    """The body of a work message (OB-9). More fields than these are a newer dispatcher's business."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job_id: UUID = Field(validation_alias="jobId")
    job_type: str = Field(validation_alias="jobType", min_length=1, max_length=64)


def read(delivery: Delivery, queue: str) -> JobMessage | None:
    """Return what a message says; None, logged and counted, if it is poison. Its body stays out of the log (AP-6)."""
    poison = log.bind(queue=queue, message_id=delivery.message_id[:64])
    if len(delivery.body) > LARGEST_BODY:
        poison.error("poison message: too large", size=len(delivery.body))
        POISON.labels(queue, "too_large").inc()
        return None
    try:
        return JobMessage.model_validate_json(delivery.body)
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)
        no_json = any(problem["type"] == "json_invalid" for problem in found)
        POISON.labels(queue, "no_json" if no_json else "other_schema").inc()
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['type']}" for problem in found]
        poison.error("poison message", problems=problems)
        return None
