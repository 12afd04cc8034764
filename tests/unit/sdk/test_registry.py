"""RG-1, RG-2, RG-3: what a definition may say, and that a bad one stops a service with every reason."""

from datetime import timedelta
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from pydantic import BaseModel, RootModel, ValidationError, create_model

from aijobs.definition import (
    CredentialMode,
    Credentials,
    Execution,
    JobDefinition,
    Metadata,
    Queue,
    Routing,
    Schema,
)
from aijobs.errors import UnknownJobType
from aijobs.registry import ENTRY_POINT_GROUP, BadDefinitions, DuplicateJobType, Registry


class Anything(BaseModel):
    pass


def definition(**changes: Any) -> JobDefinition:
    return JobDefinition(
        **{
            "job_type": "testing",
            "metadata": Metadata(label="l", description="d", domain="analysis", version="1.0.0"),
            "routing": Routing(queue=Queue.INTERACTIVE),
            "execution": Execution(timeout=timedelta(seconds=10)),
            "input": Schema(version="1", model=Anything),
            "output": Schema(version="1", model=Anything),
            "executor": "json:dumps",
            **changes,
        }
    )


GOOD = definition()
NOT_CALLABLE = definition(job_type="not_callable", executor="json:__name__", projector="no_such_module:x")
#: Models that no other process could find.
NAMELESS = definition(
    job_type="nameless",
    input=Schema(version="1", model=create_model("Nowhere")),
    output=Schema(version="1", model=RootModel[int]),
)
NO_DEFINITION = object()


@pytest.mark.parametrize("job_type", ["a1", "active_recall", "a" + "b" * 63])
def test_job_types_that_fit(job_type: str) -> None:
    assert definition(job_type=job_type).job_type == job_type


@pytest.mark.parametrize("job_type", ["", "a", "A1", "1a", "active-recall", "a b", "a" * 65, "ä1"])
def test_job_types_that_do_not(job_type: str) -> None:
    with pytest.raises(ValidationError, match="job_type"):
        definition(job_type=job_type)


@pytest.mark.parametrize("milliseconds", [1000, 600_000])
def test_timeouts_at_the_bounds(milliseconds: int) -> None:
    assert Execution(timeout=timedelta(milliseconds=milliseconds)).timeout


@pytest.mark.parametrize("milliseconds", [0, 999, 600_001])
def test_timeouts_beyond_the_bounds(milliseconds: int) -> None:
    with pytest.raises(ValidationError, match="timeout"):
        Execution(timeout=timedelta(milliseconds=milliseconds))


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": {"queue": "ai-analysis"}},
        {"routing": {"queue": "ai-interactive", "default_priority": 101}},
        {"routing": {"queue": "ai-interactive", "default_priority": -1}},
        {"execution": {"timeout": timedelta(seconds=5), "max_retries": -1}},
        {"execution": {"timeout": timedelta(seconds=5), "abort_strategy": "ask"}},
        {"metadata": {"label": "", "description": "d", "domain": "analysis", "version": "1.0.0"}},
        {"metadata": {"label": "l", "description": "d", "domain": "cooking", "version": "1.0.0"}},
        {"metadata": {"label": "l", "description": "d", "domain": "analysis", "version": "one"}},
        {"execution": {"timeout": timedelta(seconds=5), "run_timeout": timedelta(milliseconds=999)}},
        {"execution": {"timeout": timedelta(seconds=5), "run_timeout": timedelta(days=8)}},
        {"execution": {"timeout": timedelta(seconds=5), "max_retries": 21}},
        {"execution": {"timeout": timedelta(seconds=5), "backoff": timedelta(seconds=601)}},
        {"execution": {"timeout": timedelta(seconds=5), "isolation": "container"}},
        {"budget": {"model_calls": 0}},
        {"budget": {"total_tokens": -1}},
        {"budget": {"dollars": 1}},
        {"executor": "no colon"},
        {"projector": "a:b:c"},
        {"unknown": 1},
        {"credentials": {"allowed": ("platform_key",), "default": "user_deepseek_key"}},
    ],
)
def test_a_definition_out_of_bounds_cannot_be_built(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        definition(**changes)


def test_a_definition_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        setattr(GOOD, "job_type", "other")  # noqa: B010 - as an assignment, mypy refuses it before pydantic can


def test_the_queue_gives_what_a_definition_leaves_out() -> None:
    background = definition(routing=Routing(queue=Queue.BACKGROUND))
    own = definition(execution=Execution(timeout=timedelta(seconds=5), max_retries=0, backoff=timedelta(0)))
    assert (GOOD.max_retries, GOOD.backoff) == (1, timedelta(seconds=2))
    assert (background.max_retries, background.backoff) == (2, timedelta(seconds=5))
    assert (own.max_retries, own.backoff) == (0, timedelta(0))


def test_the_time_of_a_whole_run_is_what_it_can_come_to_unless_it_is_named() -> None:
    """EX-4: executions, doubling waits; for each takeover an execution and two minutes; half an hour for the line."""
    named = definition(execution=Execution(timeout=timedelta(seconds=5), run_timeout=timedelta(seconds=7)))
    counted = definition(
        execution=Execution(timeout=timedelta(seconds=5), max_retries=3, backoff=timedelta(seconds=400))
    )
    assert named.run_timeout == timedelta(seconds=7)
    waits, takeovers, line = timedelta(seconds=400 + 600 + 600), 3 * timedelta(seconds=125), timedelta(minutes=30)
    assert counted.run_timeout == 4 * timedelta(seconds=5) + waits + takeovers + line


def test_credentials_may_allow_both_modes() -> None:
    both = Credentials(allowed=tuple(CredentialMode), default=CredentialMode.USER_DEEPSEEK_KEY)
    assert both.default == CredentialMode.USER_DEEPSEEK_KEY


def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    registry = Registry([GOOD])
    assert registry["testing"] is GOOD
    assert "testing" in registry
    assert "other" not in registry
    with pytest.raises(UnknownJobType, match="known: testing"):
        registry["other"]


def test_a_type_defined_twice_is_refused() -> None:
    with pytest.raises(DuplicateJobType, match="testing: defined twice"):
        Registry([GOOD, definition()])


def test_definitions_are_listed_in_order() -> None:
    assert list(Registry([definition(job_type="b1"), definition(job_type="a1")])) == ["a1", "b1"]


def installed(monkeypatch: pytest.MonkeyPatch, **references: str) -> None:
    """Pretend that packages with these entry points are installed."""
    points = EntryPoints(EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in references.items())
    monkeypatch.setattr("aijobs.registry.metadata.entry_points", lambda group: points.select(group=group))


def test_every_violation_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(
        monkeypatch,
        broken="no_such_package:DEFINITION",
        none=f"{__name__}:NO_DEFINITION",
        nameless=f"{__name__}:NAMELESS",
        unloadable=f"{__name__}:NOT_CALLABLE",
    )
    with pytest.raises(BadDefinitions) as refusal:
        Registry.installed(load_code=True)
    text = str(refusal.value)
    for part in (
        "broken: cannot load no_such_package:DEFINITION",
        f"none: {__name__}:NO_DEFINITION is not a JobDefinition",
        "not_callable: executor json:__name__ cannot be called",
        "not_callable: projector no_such_module:x cannot be loaded",
        "nameless: its input model cannot be imported as",
        "nameless: its output model cannot be imported as",
    ):
        assert part in text


def test_only_the_executor_loads_code(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, unloadable=f"{__name__}:NOT_CALLABLE")
    assert list(Registry.installed(load_code=False)) == ["not_callable"]


def test_our_own_job_types_are_found_like_anybodys() -> None:
    registry = Registry.installed(load_code=True)
    assert {"structured_generation", "synthetic"} <= set(registry)
    for definition_ in registry.values():
        assert definition_.input.model.model_json_schema()
        assert definition_.output.model.model_json_schema()
