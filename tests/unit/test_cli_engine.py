"""The commands that hand over to other parts of the engine, with stand-ins for those parts."""

import sys
from types import ModuleType
from typing import Any

import pytest

from services.cli.__main__ import _run
from services.cli.output import Output

URL = "mysql+aiomysql://root:canary@db:3306/aijobs"


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def aijobs(*arguments: str) -> int:
    return _run([*arguments], Output(machine="--json" in arguments))


@pytest.mark.parametrize(
    ("revisions", "words"), [(["0001", "0002"], "applied 0001, 0002\n"), ([], "the database is up to date\n")]
)
def test_migrate_names_what_it_applied(
    revisions: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls: list[str] = []

    def upgrade(url: str) -> list[str]:
        urls.append(url)
        return revisions

    stand_in(monkeypatch, "services.jobs.migrate", upgrade=upgrade)
    monkeypatch.setenv("AIJOBS_DATABASE_URL", URL)
    assert aijobs("migrate") == 0
    assert urls == [URL]
    assert capsys.readouterr().out == words


def test_a_migration_without_a_database_is_one_sentence_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def upgrade(url: str) -> list[str]:
        raise RuntimeError(f"cannot connect to {url} as root:canary\nand many more lines")

    stand_in(monkeypatch, "services.jobs.migrate", upgrade=upgrade)
    assert aijobs("migrate", "--database-url", URL) == 5
    error = capsys.readouterr().err
    assert error.startswith("error: the migration failed: RuntimeError: cannot connect to the database")
    assert "canary" not in error
    assert "AIJOBS_DATABASE_URL" in error
    assert "many more" not in error


@pytest.mark.parametrize("command", ["dev", "demo"])
@pytest.mark.parametrize("status", [0, 1])
def test_dev_and_demo_exit_with_what_the_embedded_engine_returns(
    command: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, f"services.standalone.{command}", run=lambda: status)
    assert aijobs(command) == status


def test_a_part_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "services.standalone.demo", None)
    assert aijobs("demo") == 2
    assert "this installation has no services.standalone.demo" in capsys.readouterr().err


def test_an_unexpected_exception_is_a_bug_in_one_sentence_and_exits_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise ZeroDivisionError("oops")

    stand_in(monkeypatch, "services.standalone.demo", run=run)
    assert aijobs("demo") == 70
    error = capsys.readouterr().err
    assert "unexpected ZeroDivisionError in run" in error
    assert "Traceback" not in error
