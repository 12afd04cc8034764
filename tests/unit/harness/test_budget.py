"""Limits, and updates that happen whole or not at all (HA-5)."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from aijobs.harness import BudgetExceeded, RunBudget
from aijobs.harness.capacity import CapacityExceeded, RunCapacity
from tests.unit.harness.building import LIMITS, at_once


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, None])
@pytest.mark.parametrize("field", ["model_calls", "tool_calls", "tool_calls_per_tool", "input_tokens", "run_bytes"])
def test_limits_must_be_positive_integers(field: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"positive integer: {field}$"):
        replace(LIMITS, **{field: wrong})  # type: ignore[arg-type]


def test_every_wrong_limit_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="tool_calls, output_tokens, total_tokens"):
        replace(LIMITS, tool_calls=0, output_tokens=-3, total_tokens=0)


def _limit(budget: RunBudget, spend: Callable[[], object]) -> str:
    before = budget.usage
    with pytest.raises(BudgetExceeded) as breach:
        spend()
    assert budget.usage == before
    return breach.value.limit


def test_model_calls_are_counted_up_to_the_limit() -> None:
    budget = RunBudget(LIMITS)
    for _ in range(LIMITS.model_calls):
        budget.reserve_model_call()
    assert _limit(budget, budget.reserve_model_call) == "model_calls"


def test_tool_calls_are_counted_for_the_tool_and_in_all_or_not_at_all() -> None:
    budget = RunBudget(LIMITS)
    for tool in ("a", "a", "b"):
        budget.reserve_tool_call(tool)
    assert _limit(budget, lambda: budget.reserve_tool_call("a")) == "tool_calls_per_tool"
    budget.reserve_tool_call("b")
    assert _limit(budget, lambda: budget.reserve_tool_call("c")) == "tool_calls"
    assert dict(budget.usage.tool_calls) == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("tokens", "limit"), [((101, 0), "input_tokens"), ((0, 51), "output_tokens"), ((80, 41), "total_tokens")]
)
def test_tokens_beyond_the_limit_are_recorded_first(tokens: tuple[int, int], limit: str) -> None:
    budget = RunBudget(LIMITS)
    with pytest.raises(BudgetExceeded) as breach:
        budget.record_tokens(input_tokens=tokens[0], output_tokens=tokens[1])
    assert breach.value.limit == limit
    assert (budget.usage.input_tokens, budget.usage.output_tokens) == tokens


def test_tokens_at_the_limit_are_allowed_but_no_further_call_is() -> None:
    budget = RunBudget(LIMITS)
    budget.reserve_model_call()
    budget.record_tokens(input_tokens=70, output_tokens=50)
    assert _limit(budget, budget.reserve_model_call) in {"output_tokens", "total_tokens"}


def test_negative_tokens_are_refused_and_not_recorded() -> None:
    budget = RunBudget(LIMITS)
    with pytest.raises(ValueError, match="negative"):
        budget.record_tokens(input_tokens=5, output_tokens=-1)
    assert budget.usage.total_tokens == 0


def test_bytes_are_those_of_canonical_json_in_utf8() -> None:
    budget = RunBudget(LIMITS)
    assert budget.reserve_bytes({"b": "ü", "a": 1.0}) == len('{"a":1,"b":"ü"}'.encode())
    assert _limit(budget, lambda: budget.reserve_bytes("x" * 40)) == "run_bytes"


def test_capacity_grows_whole_or_not_at_all() -> None:
    capacity = RunCapacity(10)
    assert capacity.reserve(10) == 10
    with pytest.raises(CapacityExceeded, match="10 of 10 bytes are taken; 1 more"):
        capacity.reserve(1)
    assert capacity.reserve(0) == 10
    with pytest.raises(ValueError, match="negative"):
        capacity.reserve(-1)


def _in_threads(spend: Callable[[], object], number: int) -> int:
    return at_once(*[lambda: _fits(spend)] * number).count(True)


def _fits(spend: Callable[[], object]) -> bool:
    try:
        spend()
    except BudgetExceeded:
        return False
    return True


def test_threads_together_get_no_more_than_the_limits() -> None:
    budget = RunBudget(replace(LIMITS, model_calls=7, tool_calls=9, tool_calls_per_tool=5, run_bytes=33))
    assert _in_threads(budget.reserve_model_call, 16) == 7
    assert _in_threads(lambda: budget.reserve_tool_call("a"), 16) == 5
    assert _in_threads(lambda: budget.reserve_tool_call("b"), 16) == 4
    assert _in_threads(lambda: budget.reserve_bytes("x"), 16) == 11
    assert budget.usage.run_bytes == 33


def test_threads_record_all_tokens() -> None:
    budget = RunBudget(replace(LIMITS, input_tokens=10_000, output_tokens=10_000, total_tokens=20_000))
    assert _in_threads(lambda: budget.record_tokens(input_tokens=3, output_tokens=2), 32) == 32
    assert (budget.usage.input_tokens, budget.usage.output_tokens) == (96, 64)


async def test_tasks_together_get_no_more_than_the_limits() -> None:
    budget = RunBudget(LIMITS)

    async def spend() -> bool:
        await asyncio.sleep(0)
        return _fits(budget.reserve_model_call)

    assert (await asyncio.gather(*(spend() for _ in range(10)))).count(True) == LIMITS.model_calls
