"""The message that tells other backends that a job has ended (OB-8). docs/events.md says how to receive it.

    event = CompletionEvent.model_validate_json(message.body)

A subscriber that uses another language has the same as a JSON Schema, in docs/completion-event.schema.json.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

from aijobs.broker import topology
from aijobs.states import JobState

#: The topic exchange that these messages are published on.
EXCHANGE = topology.EVENTS_EXCHANGE
#: The routing key under which each end is told. Bind those that you handle: others may be added.
ROUTING_KEYS: Mapping[JobState, str] = MappingProxyType(
    {
        JobState.SUCCEEDED: "ai.job.completed",
        JobState.FAILED: "ai.job.failed",
        JobState.CANCELLED: "ai.job.cancelled",
    }
)


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


class CompletionEvent(BaseModel):
    """The body of `ai.job.completed`, `ai.job.failed` and `ai.job.cancelled`: ids and codes.

    Unknown fields are ignored, since newer engines may send more. `model_validate_json` raises a ValueError for a body
    that is none.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, validate_by_name=True)

    event_id: Annotated[str, Field(description="Identity of the event, at most 36 characters. A copy has the same.")]
    job_id: Annotated[str, Field(description="The job that has ended, at most 36 characters.")]
    job_type: Annotated[str, Field(description="Under which type it was created, at most 64 characters.")]
    state: Annotated[
        Literal[JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED],
        Field(description="How it ended. This never changes again."),
    ]
    error_code: Annotated[str | None, Field(description="Why it failed, at most 64 characters; null unless it failed.")]
    output_hash: Annotated[
        str | None, Field(description="SHA-256 of its output's canonical JSON, in hex; null unless it succeeded.")
    ]
    sequence: Annotated[
        int, Field(ge=1, description="Number of the job's history entry. Of two, the higher one is the later.")
    ]
    occurred_at: Annotated[
        AwareDatetime,
        PlainSerializer(_text, return_type=str),
        Field(description="When it ended, by the engine's database, in RFC 3339."),
    ]

    @property
    def routing_key(self) -> str:
        """The routing key that the event is published under."""
        return ROUTING_KEYS[self.state]

    def body(self) -> str:
        """Return the message's body."""
        return self.model_dump_json(by_alias=True)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the body."""
    made = CompletionEvent.model_json_schema(by_alias=True)
    fields = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in made["properties"].items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:aijobs:completion-event",
        "title": made["title"],
        "description": "Tells that a job has ended. Fields that are not listed may be added: ignore them.",
        "type": made["type"],
        "properties": fields,
        "required": made["required"],
    }
