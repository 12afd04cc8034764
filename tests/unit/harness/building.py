"""What the tests of the harness build runs from."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TypeVar

from aijobs.harness import Harness, RetryPolicies, RunBudgetLimits

T = TypeVar("T")
START = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
LONGEST = timedelta(minutes=1)
LIMITS = RunBudgetLimits(
    model_calls=3,
    tool_calls=4,
    tool_calls_per_tool=2,
    input_tokens=100,
    output_tokens=50,
    total_tokens=120,
    run_bytes=40,
)


class SettableClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> datetime:
        """Return the time."""
        return self.time

    def move(self, span: timedelta) -> None:
        """Let time pass."""
        self.time += span


def build(clock: SettableClock | None = None, limits: RunBudgetLimits = LIMITS) -> Harness:
    """Build a harness whose run ids are `run-1`, `run-2` and so on."""
    numbers = count(1)
    return Harness(
        clock=clock or SettableClock(),
        make_run_id=lambda: f"run-{next(numbers)}",
        longest_run=LONGEST,
        limits=limits,
        retry_policies=RetryPolicies.strict(),
    )


def at_once(*works: Callable[[], T]) -> list[T]:
    """Do works in a thread each, all begun at the same moment, and return what they return."""
    start = threading.Barrier(len(works))
    results: list[T] = []

    def do(work: Callable[[], T]) -> None:
        start.wait()
        results.append(work())

    threads = [threading.Thread(target=do, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
