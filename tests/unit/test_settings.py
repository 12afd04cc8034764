"""Settings: a bad one names its variable, what is wrong and what is allowed, and no secret is ever shown."""

from datetime import timedelta
from typing import Annotated

import pytest
from pydantic import Field, SecretStr

from aijobs.settings import Seconds, ServiceSettings, load

SECRET = "canary-0123456789-0123456789-0123"


class Example(ServiceSettings):
    database_url: str
    slots: Annotated[int, Field(ge=1, le=64)] = 4
    poll_time: Seconds = timedelta(seconds=1)
    queues: list[str] = Field(default_factory=list)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_DATABASE_URL", "sqlite:///x")
    for name in ("LISTEN", "TOKEN_SECRET", "TOKEN", "LOG_LEVEL", "DRAIN_SECONDS"):
        monkeypatch.delenv(f"AIJOBS_{name}", raising=False)


def test_defaults() -> None:
    settings = load(Example)
    assert (settings.listen, settings.log_level, settings.drain_time) == (
        "127.0.0.1:50051",
        "info",
        timedelta(seconds=20),
    )
    assert settings.verifier() is None
    assert settings.own_token() is None


def test_everything_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LISTEN": "0.0.0.0:7000",
        "TOKEN_SECRET": SECRET,
        "TOKEN": "t",
        "LOG_LEVEL": "debug",
        "DRAIN_SECONDS": "2.5",
        "POLL_TIME": "0.25",
        "QUEUES": '["a"]',
    }.items():
        monkeypatch.setenv(f"AIJOBS_{name}", value)
    settings = load(Example)
    assert (settings.drain_time, settings.poll_time) == (timedelta(seconds=2.5), timedelta(seconds=0.25))
    assert (settings.log_level, settings.queues, settings.own_token()) == ("debug", ["a"], "t")
    assert settings.verifier() is not None
    assert isinstance(settings.token_secret, SecretStr)
    assert SECRET not in repr(settings)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_TOKEN_SECRET", "")
    assert load(Example).token_secret is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LOG_LEVEL", "verbose", ["AIJOBS_LOG_LEVEL: ", "'debug', 'info', 'warning' or 'error'", "got 'verbose'"]),
        ("SLOTS", "0", ["AIJOBS_SLOTS: ", "greater than or equal to 1", "got '0'"]),
        ("SLOTS", "many", ["AIJOBS_SLOTS: ", "valid integer", "got 'many'"]),
        ("DRAIN_SECONDS", "soon", ["AIJOBS_DRAIN_SECONDS: ", "a number of seconds"]),
        ("DRAIN_SECONDS", "-1", ["AIJOBS_DRAIN_SECONDS: ", "greater than or equal"]),
        ("DRAIN_SECONDS", "nan", ["AIJOBS_DRAIN_SECONDS: ", "a number of seconds"]),
        ("LISTEN", "nonsense", ["AIJOBS_LISTEN: ", "host:port"]),
        ("LISTEN", "0.0.0.0:1", ["AIJOBS_TOKEN_SECRET", "127.0.0.1"]),
        ("TOKEN_SECRET", "canary-short", ["AIJOBS_TOKEN_SECRET", "at least 32 bytes"]),
        ("QUEUES", "a,b", ["AIJOBS_QUEUES: ", "JSON"]),
    ],
)
def test_a_bad_value_names_the_variable_and_what_is_allowed_and_exits_2(
    name: str,
    value: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"AIJOBS_{name}", value)
    with pytest.raises(SystemExit) as caught:
        load(Example)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert all(word in shown.err for word in words), shown.err
    assert "canary" not in shown.err


def test_every_problem_has_its_line_and_no_url_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strict(Example):
        database_url: Annotated[str, Field(pattern="^sqlite:")]

    monkeypatch.setenv("AIJOBS_DATABASE_URL", "mysql://root:canary@db/x")
    monkeypatch.setenv("AIJOBS_SLOTS", "65")
    with pytest.raises(SystemExit):
        load(Strict)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["AIJOBS_DATABASE_URL", "AIJOBS_SLOTS"]
    assert "canary" not in "".join(lines)


def test_a_missing_value_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AIJOBS_DATABASE_URL")
    with pytest.raises(SystemExit):
        load(Example)
    assert capsys.readouterr().err == "AIJOBS_DATABASE_URL: required, but not set\n"
