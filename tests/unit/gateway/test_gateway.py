import asyncio
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, CancellationReason, RunContext, RunOver, RunState
from aijobs.job_type import Message, ModelRequest, ModelTier
from services.executor.gateway.gateway import Gateway
from services.executor.gateway.ledger import CallOpened, CallSettled
from services.executor.gateway.provider import ProviderAnswer, ProviderCall, ProviderFailed, TokenSource, Usage
from tests.unit.harness.building import LIMITS, build

USED = Usage(input_tokens=11, output_tokens=7, token_source=TokenSource.MEASURED)
HARNESS = build()
SCHEMA: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUEST = ModelRequest(
    messages=[Message(role="user", content="12345678")],
    output_schema=SCHEMA,
    tier=ModelTier.STRONG,
    prompt_key="key",
    prompt_version="3",
)


class Ledger:
    def __init__(self, *, breaks: str = "") -> None:
        self.breaks = breaks
        self.rows: list[Any] = []
        self.open_gate = asyncio.Event()
        self.settle_gate = asyncio.Event()
        self.opening = asyncio.Event()
        self.settling = asyncio.Event()
        self.open_gate.set()
        self.settle_gate.set()

    async def opened(self, call: CallOpened) -> None:
        if self.breaks == "opened":
            raise ConnectionError
        self.opening.set()
        await self.open_gate.wait()
        self.rows.append(call)

    async def settled(self, call: CallSettled) -> None:
        if self.breaks == "settled":
            raise ConnectionError
        self.settling.set()
        await self.settle_gate.wait()
        self.rows.append(call)


class ScriptedProvider:
    name = "scripted"

    def __init__(self, ledger: Ledger, *outcomes: str | Exception | None) -> None:
        self.ledger = ledger
        self.outcomes = list(outcomes)
        self.calls: list[ProviderCall] = []
        self.rows_before: list[list[Any]] = []
        self.asked = asyncio.Event()

    async def complete(self, call: ProviderCall) -> ProviderAnswer:
        self.calls.append(call)
        self.rows_before.append(list(self.ledger.rows))
        self.asked.set()
        outcome = self.outcomes.pop(0)
        if outcome is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets that")
        if isinstance(outcome, Exception):
            raise outcome
        return ProviderAnswer(text=outcome, truncated=False, usage=USED)

    async def close(self) -> None:
        pass


def gateway(
    ledger: Ledger,
    *outcomes: str | Exception | None,
    first_call_no: int = 1,
    settle_bound: timedelta = timedelta(seconds=2),
    run: RunContext | None = None,
) -> tuple[Gateway, ScriptedProvider]:
    provider = ScriptedProvider(ledger, *outcomes)
    seconds = iter(range(1000))
    built = Gateway(
        provider=provider,
        models={ModelTier.PRIMARY: "small", ModelTier.STRONG: "large"},
        ledger=ledger,
        harness=HARNESS,
        run=run or HARNESS.start("job-1"),
        monotonic=lambda: float(next(seconds)),
        call_numbers=count(first_call_no),
        settle_bound=settle_bound,
    )
    return built, provider


async def test_a_success_opens_the_row_before_the_call_and_settles_it_after():
    ledger = Ledger()
    models, provider = gateway(ledger, '{"a": 1}', first_call_no=5)
    assert await models.generate_json(REQUEST) == {"a": 1}
    opened, settled = ledger.rows
    assert provider.rows_before == [[opened]]
    assert (opened.call_no, opened.provider, opened.model, opened.tier) == (5, "scripted", "large", ModelTier.STRONG)
    assert (opened.prompt_key, opened.prompt_version, opened.credential_mode) == ("key", "3", "platform_key")
    assert settled.opened == opened
    assert settled.usage == USED
    assert settled.latency == timedelta(seconds=1)
    assert settled.error_code == ""


@pytest.mark.parametrize(
    ("outcome", "code", "usage"),
    [
        (ProviderFailed("PROVIDER_UNAVAILABLE", "x"), "PROVIDER_UNAVAILABLE", Usage()),
        (ProviderFailed("PROVIDER_MALFORMED", "x", usage=USED), "PROVIDER_MALFORMED", USED),
        (ExecutionFailed("UNSUPPORTED_SCHEMA", "x"), "UNSUPPORTED_SCHEMA", Usage()),
        ("no JSON", "VALIDATION_NOT_JSON", USED),
        ('{"a": "x"}', "VALIDATION_SCHEMA", USED),
    ],
)
async def test_a_failure_is_raised_once_and_settled_with_its_code(outcome, code, usage):
    ledger = Ledger()
    models, provider = gateway(ledger, outcome, '{"a": 1}')
    with pytest.raises(ExecutionFailed) as failure:
        await models.generate_json(REQUEST)
    assert failure.value.code == code
    assert len(provider.calls) == 1
    assert [row.error_code for row in ledger.rows[1:]] == [code]
    assert ledger.rows[1].usage == usage


async def test_a_broken_provider_leaves_a_settled_row():
    ledger = Ledger()
    models, _ = gateway(ledger, RuntimeError("bug"))
    with pytest.raises(RuntimeError, match="bug"):
        await models.generate_json(REQUEST)
    assert ledger.rows[1].error_code == "INTERNAL_PROVIDER_ERROR"


async def test_calls_are_numbered_in_order():
    ledger = Ledger()
    models, _ = gateway(ledger, '{"a": 1}', "x", '{"a": 2}')
    await models.generate_json(REQUEST)
    with pytest.raises(ExecutionFailed):
        await models.generate_json(REQUEST)
    await models.generate_json(REQUEST)
    assert [row.call_no for row in ledger.rows if isinstance(row, CallOpened)] == [1, 2, 3]


async def test_no_row_no_call():
    ledger = Ledger(breaks="opened")
    models, provider = gateway(ledger, '{"a": 1}')
    with pytest.raises(ConnectionError):
        await models.generate_json(REQUEST)
    assert provider.calls == []


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task


async def test_a_cancelled_call_is_settled_as_cancelled():
    ledger = Ledger()
    models, provider = gateway(ledger, None)
    task = asyncio.create_task(models.generate_json(REQUEST))
    await provider.asked.wait()
    await cancelled(task)
    settled = ledger.rows[1]
    assert settled.error_code == "CANCELLED"
    assert settled.usage == Usage(input_tokens=2, token_source=TokenSource.ESTIMATED)


async def test_a_second_cancel_does_not_tear_the_settling():
    ledger = Ledger()
    ledger.settle_gate.clear()
    models, provider = gateway(ledger, None, settle_bound=timedelta(seconds=30))
    task = asyncio.create_task(models.generate_json(REQUEST))
    await provider.asked.wait()
    task.cancel()
    await ledger.settling.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(ledger.settle_gate.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row.error_code for row in ledger.rows[1:]] == ["CANCELLED"]


async def test_a_cancel_while_a_success_is_settled_still_settles_it_as_a_success():
    ledger = Ledger()
    ledger.settle_gate.clear()
    models, _ = gateway(ledger, '{"a": 1}')
    task = asyncio.create_task(models.generate_json(REQUEST))
    await ledger.settling.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(ledger.settle_gate.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row.error_code for row in ledger.rows[1:]] == [""]


async def test_a_cancel_while_the_row_is_opened_makes_no_call_and_settles_the_row():
    ledger = Ledger()
    ledger.open_gate.clear()
    models, provider = gateway(ledger, '{"a": 1}')
    task = asyncio.create_task(models.generate_json(REQUEST))
    await ledger.opening.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(ledger.open_gate.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.calls == []
    assert [row.error_code for row in ledger.rows[1:]] == ["CANCELLED"]


async def test_a_ledger_that_hangs_holds_a_cancelled_run_no_longer_than_the_bound():
    ledger = Ledger()
    ledger.settle_gate.clear()
    models, provider = gateway(ledger, None, settle_bound=timedelta(milliseconds=20))
    task = asyncio.create_task(models.generate_json(REQUEST))
    await provider.asked.wait()
    await cancelled(task)
    assert len(ledger.rows) == 1


async def test_a_ledger_that_breaks_does_not_swallow_a_cancel():
    ledger = Ledger(breaks="settled")
    models, provider = gateway(ledger, None)
    task = asyncio.create_task(models.generate_json(REQUEST))
    await provider.asked.wait()
    await cancelled(task)


async def test_an_engine_timeout_around_a_call_stays_a_timeout():
    ledger = Ledger()
    models, _ = gateway(ledger, None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await models.generate_json(REQUEST)
    assert ledger.rows[1].error_code == "CANCELLED"


async def test_a_run_that_is_over_asks_nobody() -> None:
    ledger = Ledger()
    run = HARNESS.start("job-1")
    built, provider = gateway(ledger, '{"a": 1}', run=run)
    HARNESS.succeed(run)
    with pytest.raises(RunOver):
        await built.generate_json(REQUEST)
    assert (provider.calls, ledger.rows) == ([], [])


async def test_a_run_that_ends_while_a_row_is_being_opened_asks_nobody_and_settles_the_row() -> None:
    ledger = Ledger()
    ledger.open_gate.clear()
    run = HARNESS.start("job-1")
    built, provider = gateway(ledger, '{"a": 1}', run=run)
    asking = asyncio.create_task(built.generate_json(REQUEST))
    await ledger.opening.wait()
    HARNESS.cancel(run, CancellationReason.USER_REQUESTED)
    ledger.open_gate.set()
    with pytest.raises(RunOver):
        await asking
    assert provider.calls == []
    opened, settled = ledger.rows
    assert (settled.opened, settled.error_code) == (opened, "CANCELLED")


async def test_a_call_counts_against_the_budget_with_what_it_really_used() -> None:
    run = HARNESS.start("job-1")
    built, _ = gateway(Ledger(), '{"a": 1}', ProviderFailed("PROVIDER_MALFORMED", "x", usage=USED), run=run)
    await built.generate_json(REQUEST)
    with pytest.raises(ProviderFailed):
        await built.generate_json(REQUEST)
    used = run.budget.usage
    assert (used.model_calls, used.input_tokens, used.output_tokens) == (
        2,
        2 * USED.input_tokens,
        2 * USED.output_tokens,
    )


async def test_a_call_beyond_the_budget_is_not_made_and_leaves_no_row() -> None:
    ledger = Ledger()
    run = HARNESS.start("job-1")
    built, provider = gateway(ledger, *['{"a": 1}'] * LIMITS.model_calls, run=run)
    for _ in range(LIMITS.model_calls):
        await built.generate_json(REQUEST)
    rows = len(ledger.rows)
    with pytest.raises(BudgetExceeded, match="model_calls"):
        await built.generate_json(REQUEST)
    assert (len(provider.calls), len(ledger.rows)) == (LIMITS.model_calls, rows)
    assert run.lifecycle.state == RunState.BUDGET_EXHAUSTED


async def test_a_call_that_used_more_than_is_left_is_settled_and_ends_the_run() -> None:
    ledger = Ledger()
    run = HARNESS.start("job-1")
    much = Usage(input_tokens=LIMITS.input_tokens + 1, output_tokens=1, token_source=TokenSource.MEASURED)
    built, _ = gateway(ledger, ProviderFailed("PROVIDER_MALFORMED", "x", usage=much), run=run)
    with pytest.raises(BudgetExceeded, match="input_tokens"):
        await built.generate_json(REQUEST)
    assert [row.usage for row in ledger.rows[1:]] == [much]
    assert run.lifecycle.state == RunState.BUDGET_EXHAUSTED


async def test_what_a_cancelled_call_used_is_counted_all_the_same() -> None:
    ledger = Ledger()
    run = HARNESS.start("job-1")
    built, provider = gateway(ledger, None, run=run)
    asking = asyncio.create_task(built.generate_json(REQUEST))
    await provider.asked.wait()
    HARNESS.cancel(run, CancellationReason.USER_REQUESTED)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert [row.error_code for row in ledger.rows[1:]] == ["CANCELLED"]
    assert run.budget.usage.input_tokens == ledger.rows[1].usage.input_tokens > 0


async def test_a_call_ends_with_its_run_though_nobody_cancels_whoever_waits_for_it() -> None:
    """EX-4: a handler in a thread cannot be cancelled, and would pay for the answer."""
    ledger = Ledger()
    run = HARNESS.start("job-1")
    built, provider = gateway(ledger, None, run=run)
    asking = asyncio.create_task(built.generate_json(REQUEST))
    await provider.asked.wait()
    HARNESS.cancel(run, CancellationReason.DEADLINE_EXCEEDED)
    with pytest.raises(RunOver, match="TIMED_OUT"):
        await asking
    assert [row.error_code for row in ledger.rows[1:]] == ["CANCELLED"]
