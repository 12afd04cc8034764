"""Technical calls inside of a run: one or two tries, each reported (HA-6)."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from aijobs.harness import (
    BudgetExceeded,
    CancellationReason,
    FailureKind,
    OperationFailed,
    RetryAttempt,
    RetryPolicies,
    RetryPolicy,
    RunOver,
    run_with_retry,
)
from tests.unit.harness.building import LONGEST, SettableClock, build

TIMEOUT_TWICE = RetryPolicy(attempts=2, retryable=frozenset({FailureKind.TIMEOUT}))
NEVER_AGAIN = (
    FailureKind.NO_EVIDENCE,
    FailureKind.BUSINESS_REFUSED,
    FailureKind.CANCELLED,
    FailureKind.DEADLINE,
    FailureKind.BUDGET,
    FailureKind.UNKNOWN,
)


class Operation:
    """Fails as it is told, then answers."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.attempts: list[int] = []

    async def __call__(self, attempt: int) -> str:
        """Do it."""
        self.attempts.append(attempt)
        if self.failures:
            raise self.failures.pop(0)
        return "done"


async def _try(
    operation: Operation,
    policy: RetryPolicy = TIMEOUT_TWICE,
    check: Callable[[], None] = lambda: None,
) -> tuple[str | BaseException, list[RetryAttempt]]:
    recorded: list[RetryAttempt] = []
    try:
        return await run_with_retry(operation, name="op", policy=policy, check=check, record=recorded.append), recorded
    except BaseException as error:  # noqa: BLE001 - the tests look at it
        return error, recorded


def _failed(kind: FailureKind) -> OperationFailed:
    return OperationFailed(kind, "why")


@pytest.mark.parametrize("attempts", [0, 3, -1])
def test_a_policy_allows_one_attempt_or_two(attempts: int) -> None:
    with pytest.raises(ValueError, match="1 or 2"):
        RetryPolicy(attempts=attempts)


@pytest.mark.parametrize("kind", NEVER_AGAIN)
def test_no_policy_can_name_what_is_never_tried_again(kind: FailureKind) -> None:
    with pytest.raises(ValueError, match=kind):
        RetryPolicy(attempts=2, retryable=frozenset({FailureKind.TIMEOUT, kind}))


def test_the_strict_policies() -> None:
    kinds = FailureKind
    strict = RetryPolicies.strict()
    assert strict.router == RetryPolicy(
        attempts=2, retryable=frozenset({kinds.TIMEOUT, kinds.TRANSPORT, kinds.INVALID_OUTPUT})
    )
    assert strict.semantic_guard == RetryPolicy(
        attempts=2, retryable=frozenset({kinds.TIMEOUT, kinds.TRANSPORT, kinds.PARSE, kinds.SCHEMA})
    )
    assert strict.diagnosis == strict.tool == strict.evidence_repair == RetryPolicy(attempts=1)


async def test_a_success_is_reported_and_not_repeated() -> None:
    operation = Operation()
    result, recorded = await _try(operation)
    assert (result, operation.attempts) == ("done", [1])
    assert recorded == [RetryAttempt(operation="op", attempt=1, failure=None)]


async def test_a_failure_that_the_policy_names_is_tried_once_more() -> None:
    operation = Operation(_failed(FailureKind.TIMEOUT))
    result, recorded = await _try(operation)
    assert (result, operation.attempts) == ("done", [1, 2])
    assert [attempt.failure for attempt in recorded] == [FailureKind.TIMEOUT, None]


async def test_the_second_failure_is_the_last() -> None:
    operation = Operation(_failed(FailureKind.TIMEOUT), _failed(FailureKind.TIMEOUT))
    result, recorded = await _try(operation)
    assert isinstance(result, OperationFailed)
    assert [attempt.attempt for attempt in recorded] == [1, 2]


@pytest.mark.parametrize("kind", [FailureKind.TRANSPORT, *NEVER_AGAIN])
async def test_other_failures_are_not_tried_again(kind: FailureKind) -> None:
    operation = Operation(_failed(kind))
    result, recorded = await _try(operation)
    assert isinstance(result, OperationFailed)
    assert [attempt.failure for attempt in recorded] == [kind]


async def test_one_attempt_is_one_attempt() -> None:
    operation = Operation(_failed(FailureKind.TIMEOUT))
    await _try(operation, RetryPolicy(attempts=1, retryable=frozenset({FailureKind.TIMEOUT})))
    assert operation.attempts == [1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncio.CancelledError(), FailureKind.CANCELLED),
        (BudgetExceeded("model_calls", "4 wanted, 3 allowed"), FailureKind.BUDGET),
        (TimeoutError(), FailureKind.UNKNOWN),
        (KeyError("x"), FailureKind.UNKNOWN),
    ],
)
async def test_an_exception_that_names_no_kind_passes_on_after_one_attempt(
    error: BaseException, kind: FailureKind
) -> None:
    result, recorded = await _try(Operation(error))
    assert result is error
    assert [attempt.failure for attempt in recorded] == [kind]


async def test_the_run_is_checked_before_every_attempt() -> None:
    harness = build()
    run = harness.start("session")

    class Cancelling(Operation):
        async def __call__(self, attempt: int) -> str:
            harness.cancel(run, CancellationReason.USER_REQUESTED)
            return await super().__call__(attempt)

    operation = Cancelling(_failed(FailureKind.TIMEOUT))
    result, recorded = await _try(operation, check=lambda: harness.check(run))
    assert isinstance(result, RunOver)
    assert (operation.attempts, len(recorded)) == ([1], 1)
    result, recorded = await _try(operation, check=lambda: harness.check(run))
    assert (operation.attempts, recorded) == ([1], [])


async def test_a_boundary_inside_of_the_operation_tells_how_the_run_ended() -> None:
    clock = SettableClock()
    harness = build(clock)
    run = harness.start("session")
    recorded: list[RetryAttempt] = []

    async def ask(_: int) -> None:
        clock.move(LONGEST + timedelta(seconds=1))
        harness.check(run)

    with pytest.raises(RunOver):
        await run_with_retry(
            ask, name="ask", policy=TIMEOUT_TWICE, check=lambda: harness.check(run), record=recorded.append
        )
    assert [attempt.failure for attempt in recorded] == [FailureKind.DEADLINE]


async def test_a_broken_recorder_costs_nobody_the_result() -> None:
    def record(_: RetryAttempt) -> None:
        raise OSError

    operation = Operation(_failed(FailureKind.TIMEOUT))
    result = await run_with_retry(operation, name="op", policy=TIMEOUT_TWICE, check=lambda: None, record=record)
    assert (result, operation.attempts) == ("done", [1, 2])
