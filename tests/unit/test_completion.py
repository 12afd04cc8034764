"""The message about a job's end, as other teams read it: model, schema and page say the same (OB-8)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from aijobs.completion import CompletionEvent, json_schema
from aijobs.states import JobState

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "events.md").read_text()
SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def sample(**changes: object) -> dict[str, Any]:
    """Return the body that the page shows."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    body: dict[str, Any] = json.loads(block)
    return body | changes


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_the_page_shows_a_message_that_can_be_read_and_is_written_in_the_same_way() -> None:
    VALIDATOR.validate(sample())
    event = CompletionEvent.model_validate_json(json.dumps(sample()))
    assert json.loads(event.body()) == sample()
    assert event.routing_key == "ai.job.failed"


def test_the_page_lists_every_field_as_the_schema_has_it() -> None:
    section = PAGE.partition("| field | type | meaning |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    assert listed == [(name, shown(field), field["description"]) for name, field in SCHEMA["properties"].items()]


def shown(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    return ", ".join(kind["type"] for kind in field.get("anyOf", [field]))


def test_fields_that_a_newer_engine_adds_are_ignored() -> None:
    VALIDATOR.validate(sample(costs="3.50"))
    assert CompletionEvent.model_validate_json(json.dumps(sample(costs="3.50"))).state == JobState.FAILED


@pytest.mark.parametrize(
    "changes",
    [{"state": "running"}, {"sequence": "3"}, {"sequence": 0}, {"errorCode": 7}, {"eventId": None}],
    ids=json.dumps,
)
def test_what_is_no_such_message_is_refused_by_model_and_schema(changes: dict[str, object]) -> None:
    assert not VALIDATOR.is_valid(sample(**changes))
    with pytest.raises(ValidationError):
        CompletionEvent.model_validate_json(json.dumps(sample(**changes)))


@pytest.mark.parametrize("name", SCHEMA["properties"])
def test_no_field_may_be_missing(name: str) -> None:
    body = {key: value for key, value in sample().items() if key != name}
    assert not VALIDATOR.is_valid(body)
    with pytest.raises(ValidationError):
        CompletionEvent.model_validate_json(json.dumps(body))


@pytest.mark.parametrize("text", ["yesterday", "2026-11-30T10:15:00"])
def test_a_time_without_a_zone_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        CompletionEvent.model_validate_json(json.dumps(sample(occurredAt=text)))


def test_an_event_cannot_be_changed() -> None:
    event = CompletionEvent.model_validate_json(json.dumps(sample()))
    with pytest.raises(ValidationError):
        setattr(event, "state", JobState.SUCCEEDED)  # noqa: B010 - mypy would not let it pass otherwise
