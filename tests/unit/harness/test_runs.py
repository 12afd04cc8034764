"""The gate: starting, boundaries, and the one end of a run (HA-1, HA-2, HA-4)."""

import ast
import asyncio
from dataclasses import FrozenInstanceError
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

import aijobs.harness
from aijobs.harness import BudgetExceeded, CancellationReason, Harness, RunOver, RunState
from tests.unit.harness.building import LIMITS, LONGEST, START, SettableClock, at_once, build

BOUNDARIES = {
    "check": lambda harness, run: harness.check(run),
    "model": lambda harness, run: harness.reserve_model_call(run),
    "tool": lambda harness, run: harness.reserve_tool_call(run, "search"),
    "capacity": lambda harness, run: harness.reserve_bytes(run, "kept"),
}


def test_a_run_has_the_ids_it_is_given_or_made() -> None:
    harness = build()
    given = harness.start("session", run_id="job.1.2")
    made = harness.start("session")
    assert (given.session_id, given.run_id, given.deadline) == ("session", "job.1.2", START + LONGEST)
    assert made.run_id == "run-1"


@pytest.mark.parametrize("wrong", ["", "a b", "a:b", "a\n", "ü", "x" * 129])
def test_ids_must_be_segments(wrong: str) -> None:
    with pytest.raises(ValueError, match="session_id"):
        build().start(wrong)
    with pytest.raises(ValueError, match="run_id"):
        build().start("session", run_id=wrong)


def test_the_longest_run_must_be_positive() -> None:
    with pytest.raises(ValueError, match="longest_run"):
        Harness(
            clock=SettableClock(),
            make_run_id=lambda: "run",
            longest_run=timedelta(0),
            limits=LIMITS,
            retry_policies=build().start("session").retry_policies,
        )


def test_a_context_never_changes() -> None:
    run = build().start("session")
    with pytest.raises(FrozenInstanceError):
        run.run_id = "another"  # type: ignore[misc]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_boundary_lets_an_active_run_pass_and_stops_one_at_its_deadline(boundary: str) -> None:
    clock = SettableClock()
    harness = build(clock)
    run = harness.start("session")
    clock.move(LONGEST - timedelta(microseconds=1))
    BOUNDARIES[boundary](harness, run)
    used = run.budget.usage
    clock.move(timedelta(microseconds=1))
    with pytest.raises(RunOver) as refusal:
        BOUNDARIES[boundary](harness, run)
    assert refusal.value.termination.state == RunState.TIMED_OUT
    assert run.cancellation.reason == CancellationReason.DEADLINE_EXCEEDED
    assert run.lifecycle.termination is not None
    assert run.lifecycle.termination.at == START + LONGEST
    assert run.budget.usage == used


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_boundary_stops_a_run_that_was_cancelled(boundary: str) -> None:
    harness = build()
    run = harness.start("session")
    assert harness.cancel(run, CancellationReason.USER_REQUESTED)
    with pytest.raises(RunOver, match="CANCELLED, USER_REQUESTED"):
        BOUNDARIES[boundary](harness, run)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (CancellationReason.CLIENT_DISCONNECTED, RunState.CANCELLED),
        (CancellationReason.USER_REQUESTED, RunState.CANCELLED),
        (CancellationReason.INTERNAL_FAILURE, RunState.CANCELLED),
        (CancellationReason.DEADLINE_EXCEEDED, RunState.TIMED_OUT),
        (CancellationReason.BUDGET_EXHAUSTED, RunState.BUDGET_EXHAUSTED),
    ],
)
def test_each_reason_gives_its_end_which_is_written_before_anybody_is_told(
    reason: CancellationReason, state: RunState
) -> None:
    harness = build()
    run = harness.start("session")
    seen: list[RunState] = []
    run.cancellation.on_cancel(lambda _: seen.append(run.lifecycle.state))
    harness.cancel(run, reason)
    assert seen == [state]
    assert run.lifecycle.termination is not None
    assert run.lifecycle.termination.reason == reason


@pytest.mark.parametrize(
    "spend",
    [
        lambda harness, run: [harness.reserve_model_call(run) for _ in range(LIMITS.model_calls + 1)],
        lambda harness, run: [harness.reserve_tool_call(run, "search") for _ in range(LIMITS.tool_calls_per_tool + 1)],
        lambda harness, run: harness.reserve_bytes(run, "x" * LIMITS.run_bytes),
        lambda harness, run: harness.record_tokens(run, input_tokens=LIMITS.input_tokens + 1, output_tokens=0),
    ],
)
def test_a_breach_of_the_budget_ends_the_run_before_anybody_is_told(spend: object) -> None:
    harness = build()
    run = harness.start("session")
    seen: list[RunState] = []
    run.cancellation.on_cancel(lambda _: seen.append(run.lifecycle.state))
    with pytest.raises(BudgetExceeded):
        spend(harness, run)  # type: ignore[operator]
    assert seen == [RunState.BUDGET_EXHAUSTED]
    with pytest.raises(RunOver, match="BUDGET_EXHAUSTED"):
        harness.check(run)


def test_tokens_of_a_run_that_has_ended_are_recorded_all_the_same() -> None:
    harness = build()
    run = harness.start("session")
    harness.cancel(run, CancellationReason.USER_REQUESTED)
    harness.record_tokens(run, input_tokens=7, output_tokens=3)
    assert run.budget.usage.total_tokens == 10


def test_the_first_end_stands() -> None:
    clock = SettableClock()
    harness = build(clock)
    run = harness.start("session")
    assert harness.succeed(run)
    clock.move(2 * LONGEST)
    assert not harness.succeed(run)
    assert not harness.fail(run, "INTERNAL_X")
    assert not harness.cancel(run, CancellationReason.USER_REQUESTED)
    assert run.lifecycle.termination is not None
    assert (run.lifecycle.state, run.lifecycle.termination.at) == (RunState.SUCCESS, START)
    # Nobody is told to stop: there is nothing to stop.
    assert not run.cancellation.cancelled
    with pytest.raises(RunOver, match="SUCCESS"):
        harness.check(run)


def test_success_at_the_deadline_is_none() -> None:
    clock = SettableClock()
    harness = build(clock)
    run = harness.start("session")
    clock.move(LONGEST)
    assert not harness.succeed(run)
    assert run.lifecycle.state == RunState.TIMED_OUT


def test_a_failure_keeps_its_reason() -> None:
    harness = build()
    run = harness.start("session")
    assert harness.fail(run, "PROVIDER_TIMEOUT")
    assert run.lifecycle.termination is not None
    assert run.lifecycle.termination.reason == "PROVIDER_TIMEOUT"


def test_of_many_threads_exactly_one_ends_a_run_and_tells() -> None:
    for _ in range(50):
        harness = build()
        run = harness.start("session")
        told: list[CancellationReason] = []
        run.cancellation.on_cancel(told.append)
        cancel = partial(harness.cancel, run, CancellationReason.USER_REQUESTED)
        ended = at_once(*[partial(harness.succeed, run), cancel] * 4)
        assert ended.count(True) == 1
        assert len(told) == (run.lifecycle.state == RunState.CANCELLED)


async def test_of_many_tasks_exactly_one_ends_a_run() -> None:
    harness = build()
    run = harness.start("session")

    async def end() -> bool:
        await asyncio.sleep(0)
        return harness.fail(run, "INTERNAL_X")

    assert (await asyncio.gather(*(end() for _ in range(20)))).count(True) == 1


def test_runs_share_nothing() -> None:
    harness = build()
    one, other = harness.start("session"), harness.start("session")
    harness.reserve_model_call(one)
    harness.cancel(one, CancellationReason.USER_REQUESTED)
    assert other.lifecycle.state == RunState.RUNNING
    assert other.budget.usage.model_calls == 0


def test_nothing_in_the_harness_is_ambient() -> None:
    """No contextvars, no thread locals, no clock or randomness of its own, no state at module level (HA-1, HA-2)."""
    folder = Path(aijobs.harness.__file__).parent
    for file in folder.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & {"ContextVar", "local", "utcnow", "sleep", "uuid4", "uuid7"}, file.name
        assert not modules & {"contextvars", "random", "time", "uuid"}, file.name
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], file.name
