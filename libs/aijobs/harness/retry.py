"""Technical calls inside of a run: one or two tries, each of them reported (HA-6).

Nothing waits here and nothing is tried again unseen: executions as a whole are retried by the engine, with backoff
(ruling 34). Only the failures that a policy names are tried again, and only those that can be named are technical ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

from aijobs.harness.budget import BudgetExceeded
from aijobs.harness.lifecycle import RunOver, RunState

T = TypeVar("T")
MOST_ATTEMPTS = 2
logger = logging.getLogger(__name__)


class FailureKind(StrEnum):
    """Why a technical call failed."""

    TIMEOUT = "TIMEOUT"
    TRANSPORT = "TRANSPORT"
    INVALID_OUTPUT = "INVALID_OUTPUT"
    PARSE = "PARSE"
    SCHEMA = "SCHEMA"
    #: The rest is never tried again.
    NO_EVIDENCE = "NO_EVIDENCE"
    BUSINESS_REFUSED = "BUSINESS_REFUSED"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    BUDGET = "BUDGET"
    UNKNOWN = "UNKNOWN"


TECHNICAL = frozenset(
    {
        FailureKind.TIMEOUT,
        FailureKind.TRANSPORT,
        FailureKind.INVALID_OUTPUT,
        FailureKind.PARSE,
        FailureKind.SCHEMA,
    }
)


#: What a run that ends in the middle of an operation makes of it.
_ENDS = {
    RunState.CANCELLED: FailureKind.CANCELLED,
    RunState.TIMED_OUT: FailureKind.DEADLINE,
    RunState.BUDGET_EXHAUSTED: FailureKind.BUDGET,
}


class OperationFailed(Exception):
    """Raised by an operation to say why it failed. Any other exception is an UNKNOWN failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often an operation may be tried, and after which failures.

    Raises:
        ValueError: not 1 or 2 attempts, or a failure that is never tried again.

    """

    attempts: int
    retryable: frozenset[FailureKind] = frozenset()

    def __post_init__(self) -> None:
        if self.attempts not in range(1, MOST_ATTEMPTS + 1):
            raise ValueError(f"attempts: 1 or 2, not {self.attempts}")
        if wrong := self.retryable - TECHNICAL:
            raise ValueError(f"never tried again: {', '.join(sorted(wrong))}")

    def allows_another(self, attempt: int, failure: FailureKind) -> bool:
        """Tell whether another attempt may follow attempt number `attempt`, from 1, that failed so."""
        return attempt < self.attempts and failure in self.retryable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicies:
    """The policies of the operations that an agentic run is made of (HA-9)."""

    router: RetryPolicy
    diagnosis: RetryPolicy
    tool: RetryPolicy
    semantic_guard: RetryPolicy
    evidence_repair: RetryPolicy

    @classmethod
    def strict(cls) -> Self:
        """Return the policies that try again where it can help, once."""
        once = RetryPolicy(attempts=1)
        transient = {FailureKind.TIMEOUT, FailureKind.TRANSPORT}
        return cls(
            router=RetryPolicy(attempts=2, retryable=frozenset(transient | {FailureKind.INVALID_OUTPUT})),
            diagnosis=once,
            tool=once,
            semantic_guard=RetryPolicy(
                attempts=2, retryable=frozenset(transient | {FailureKind.PARSE, FailureKind.SCHEMA})
            ),
            evidence_repair=once,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAttempt:
    """One attempt of an operation. `failure` is None if it succeeded."""

    operation: str
    attempt: int
    failure: FailureKind | None


async def run_with_retry(
    operation: Callable[[int], Awaitable[T]],
    *,
    name: str,
    policy: RetryPolicy,
    check: Callable[[], None],
    record: Callable[[RetryAttempt], None],
) -> T:
    """Do an operation, once more if its policy allows.

    Args:
        operation: is given the number of the attempt, from 1.
        name: of the operation, for the record.
        policy: how often, and after which failures.
        check: passes the harness's boundary before every attempt; what it raises ends the operation.
        record: is told of every attempt. If it raises, that is logged and changes nothing.

    Raises:
        RunOver: the run has ended before an attempt.
        Exception: what the last attempt raised.

    """
    attempt = 1
    while True:
        check()
        try:
            result = await operation(attempt)
        except BaseException as error:
            failure = _kind(error)
            _record(record, RetryAttempt(operation=name, attempt=attempt, failure=failure))
            if not policy.allows_another(attempt, failure):
                raise
        else:
            _record(record, RetryAttempt(operation=name, attempt=attempt, failure=None))
            return result
        attempt += 1


def _kind(error: BaseException) -> FailureKind:
    match error:
        case OperationFailed():
            return error.kind
        case BudgetExceeded():
            return FailureKind.BUDGET
        case asyncio.CancelledError():
            return FailureKind.CANCELLED
        case RunOver():
            return _ENDS.get(error.termination.state, FailureKind.UNKNOWN)
        case _:
            return FailureKind.UNKNOWN


def _record(record: Callable[[RetryAttempt], None], attempt: RetryAttempt) -> None:
    try:
        record(attempt)
    except Exception as error:  # noqa: BLE001 - the operation has happened; its result is not thrown away
        logger.error("an attempt of %s was not recorded: %s", attempt.operation, type(error).__name__)
