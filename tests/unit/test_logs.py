"""Logs are JSON lines in UTC, from everybody, without payloads and secrets."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog
from pydantic import BaseModel

from aijobs import logs

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    logs.configure("jobs", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def test_a_line_is_json_with_service_level_and_utc_time(lines: Lines) -> None:
    structlog.stdlib.get_logger("aijobs.x").info("hello", job_id="j-1", n=3)
    (line,) = lines()
    assert (line["event"], line["service"], line["level"], line["logger"]) == ("hello", "jobs", "info", "aijobs.x")
    assert (line["job_id"], line["n"]) == ("j-1", 3)
    assert datetime.now(UTC) - datetime.fromisoformat(line["timestamp"]) < timedelta(minutes=1)
    assert line["timestamp"].endswith("Z")


def test_the_standard_library_comes_out_in_the_same_form(lines: Lines) -> None:
    logging.getLogger("somebody").warning("hello %s", "you", extra={"api_key": "canary"})
    (line,) = lines()
    assert (line["event"], line["service"], line["level"], line["api_key"]) == (
        "hello you",
        "jobs",
        "warning",
        logs.MASK,
    )


def test_levels_below_the_configured_one_are_left_out(lines: Lines) -> None:
    structlog.stdlib.get_logger("aijobs.x").debug("quiet")
    logging.getLogger("aiormq").info("a frame")
    assert lines() == []


@pytest.mark.parametrize(
    "key",
    [
        "input",
        "output",
        "input_json",
        "output_json",
        "payload",
        "prompt",
        "token",
        "lease_token",
        "api_key",
        "apikey",
        "authorization",
        "password",
        "token_secret",
        "database_url",
        "credential_id",
        "body",
        "snapshot_json",
        "content",
    ],
)
def test_secrets_and_payloads_are_masked_at_any_depth(key: str, lines: Lines) -> None:
    log = structlog.stdlib.get_logger("aijobs.x")
    log.info("top", **{key: "canary"})
    log.info("deep", things=[{"inner": {key: ["canary"]}}])
    assert "canary" not in str(lines())
    assert lines()[0][key] == logs.MASK


def test_counts_and_ids_stay_readable(lines: Lines) -> None:
    structlog.stdlib.get_logger("aijobs.x").info("usage", input_tokens=12, output_tokens=3, output_hash="ab", key="k")
    (line,) = lines()
    assert (line["input_tokens"], line["output_tokens"], line["output_hash"]) == (12, 3, "ab")


def test_an_object_shows_its_kind_only(lines: Lines) -> None:
    class Thing:
        def __repr__(self) -> str:
            return "canary"

    structlog.stdlib.get_logger("aijobs.x").info("thing", thing=Thing())
    assert lines()[0]["thing"] == "<test_an_object_shows_its_kind_only.<locals>.Thing>"


def test_a_traceback_names_code_and_causes_but_repeats_no_input(lines: Lines) -> None:
    class Answer(BaseModel):
        n: int

    log = structlog.stdlib.get_logger("aijobs.x")
    try:
        try:
            Answer.model_validate({"n": "canary"})
        except ValueError as error:
            raise RuntimeError("outer (x) [parameters: ('canary',)]") from error
    except RuntimeError:
        log.exception("broke")
    (line,) = lines()
    assert "test_logs.py" in line["exception"]
    assert "n: int_parsing" in line["exception"]
    assert "RuntimeError: outer" in line["exception"]
    assert line["exception"].index("int_parsing") < line["exception"].index("RuntimeError")
    # Lines of source are shown as they are; what values had at run time is not.
    shown = [text for text in line["exception"].splitlines() if not text.startswith("    ")]
    assert "canary" not in "".join(shown)
