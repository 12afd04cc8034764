"""The one gate to runs: starts them, checks them at each boundary, and ends them (HA-2).

It keeps no table of runs, stores nothing, and knows no scheduler, configuration or backoff: a run lives as long as its
context. What ends a run is written down first and told afterwards, so whoever hears of the cancel sees why.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from pydantic import JsonValue

from aijobs.harness.budget import BudgetExceeded, RunBudget, RunBudgetLimits
from aijobs.harness.cancellation import CancellationReason, RunCancellation
from aijobs.harness.context import RunContext
from aijobs.harness.lifecycle import RunLifecycle, RunOver, RunState, RunTermination
from aijobs.harness.retry import RetryPolicies
from aijobs.harness.tool_keys import require_segment

#: The end that each reason for cancelling gives a run.
ENDS = {
    CancellationReason.CLIENT_DISCONNECTED: RunState.CANCELLED,
    CancellationReason.USER_REQUESTED: RunState.CANCELLED,
    CancellationReason.INTERNAL_FAILURE: RunState.CANCELLED,
    CancellationReason.DEADLINE_EXCEEDED: RunState.TIMED_OUT,
    CancellationReason.BUDGET_EXHAUSTED: RunState.BUDGET_EXHAUSTED,
}


class Harness:
    """Starts runs and is asked at every boundary. Built once, for all runs that share limits; holds none of them.

    Args:
        clock: the time, aware. All times of a run come from it.
        make_run_id: makes the id of a run that is started without one.
        longest_run: from the start of a run to its deadline, positive.
        limits: what each run may use.
        retry_policies: for technical calls inside of runs.
        notify: calls cancel callbacks where they belong; by default at once, in the thread that cancels.

    Raises:
        ValueError: `longest_run` is not positive.

    """

    def __init__(
        self,
        *,
        clock: Callable[[], datetime],
        make_run_id: Callable[[], str],
        longest_run: timedelta,
        limits: RunBudgetLimits,
        retry_policies: RetryPolicies,
        notify: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        if longest_run <= timedelta(0):
            raise ValueError(f"longest_run must be positive: {longest_run}")
        self._clock = clock
        self._make_run_id = make_run_id
        self._longest_run = longest_run
        self._limits = limits
        self._retry_policies = retry_policies
        self._notify = notify

    def start(self, session_id: str, *, run_id: str | None = None, longest: timedelta | None = None) -> RunContext:
        """Start a run.

        Args:
            session_id: the caller's; never made here.
            run_id: of the run; None: make one.
            longest: until the deadline, if that is less than the harness allows.

        Raises:
            ValueError: an id is not 1 to 128 of `A-Z a-z 0-9 _ . -`.

        """
        return RunContext(
            session_id=require_segment("session_id", session_id),
            run_id=require_segment("run_id", self._make_run_id() if run_id is None else run_id),
            deadline=self._clock() + (self._longest_run if longest is None else min(longest, self._longest_run)),
            cancellation=RunCancellation(self._notify),
            budget=RunBudget(self._limits),
            retry_policies=self._retry_policies,
            lifecycle=RunLifecycle(),
        )

    def check(self, run: RunContext) -> None:
        """Pass a boundary.

        Raises:
            RunOver: the run has ended; at its deadline, by this very call.

        """
        if self._clock() >= run.deadline:
            self.cancel(run, CancellationReason.DEADLINE_EXCEEDED)
        if (termination := run.lifecycle.termination) is not None:
            raise RunOver(termination)

    def remaining(self, run: RunContext) -> timedelta:
        """Return the time until a run's deadline; zero if it has come."""
        return max(run.deadline - self._clock(), timedelta(0))

    def reserve_model_call(self, run: RunContext) -> None:
        """Pass the boundary before a model call, and count it.

        Raises:
            RunOver: the run has ended.
            BudgetExceeded: no call is left; the run has ended by it.

        """
        self._within_budget(run, run.budget.reserve_model_call)

    def reserve_tool_call(self, run: RunContext, tool: str) -> None:
        """Pass the boundary before a tool call, and count it.

        Raises:
            RunOver: the run has ended.
            BudgetExceeded: no call is left; the run has ended by it.

        """
        self._within_budget(run, lambda: run.budget.reserve_tool_call(tool))

    def reserve_bytes(self, run: RunContext, value: JsonValue) -> None:
        """Pass the boundary before something is kept, and count its bytes as JSON.

        Raises:
            RunOver: the run has ended.
            BudgetExceeded: they do not fit; the run has ended by it.
            NotStrictJson: the value is no JSON.

        """
        self._within_budget(run, lambda: run.budget.reserve_bytes(value))

    def record_tokens(self, run: RunContext, *, input_tokens: int, output_tokens: int) -> None:
        """Record what a model call used, whether or not the run has ended meanwhile: it is spent.

        Raises:
            BudgetExceeded: it is more than the run may use; recorded all the same, and the run has ended by it.
            ValueError: a count is negative.

        """
        try:
            run.budget.record_tokens(input_tokens=input_tokens, output_tokens=output_tokens)
        except BudgetExceeded as breach:
            self.cancel(run, CancellationReason.BUDGET_EXHAUSTED, str(breach))
            raise

    def cancel(self, run: RunContext, reason: CancellationReason, detail: str = "") -> bool:
        """End a run and tell everybody who works for it. True if this call ended it."""
        termination = RunTermination(state=ENDS[reason], reason=reason, at=self._clock(), detail=detail)
        ended = run.lifecycle.finish(termination)
        if ended:
            run.cancellation.cancel(reason)
        return ended

    def succeed(self, run: RunContext) -> bool:
        """End a run with success. False, and no success, if it had ended or its deadline has come."""
        if self._clock() >= run.deadline:
            self.cancel(run, CancellationReason.DEADLINE_EXCEEDED)
        return run.lifecycle.finish(RunTermination(state=RunState.SUCCESS, reason="", at=self._clock()))

    def fail(self, run: RunContext, reason: str) -> bool:
        """End a run with a failure. False if it had ended."""
        return run.lifecycle.finish(RunTermination(state=RunState.FAILED, reason=reason, at=self._clock()))

    def _within_budget(self, run: RunContext, reserve: Callable[[], object]) -> None:
        self.check(run)
        try:
            reserve()
        except BudgetExceeded as breach:
            self.cancel(run, CancellationReason.BUDGET_EXHAUSTED, str(breach))
            raise
