"""The harness: what bounds one run, and the one gate to it (HA-1 to HA-7).

A caller starts a run with `Harness.start` and hands its `RunContext` on, explicitly, to all tasks and threads that work
for the run. Through it they share deadline, budget, cancellation and lifecycle, and they ask the harness at each
boundary. Nothing is ambient: no contextvars, no thread locals, no table of runs.

    Harness.start ─▶ RunContext ┬ lifecycle      RUNNING, then exactly one end
      check                     ├ cancellation   the first reason, told to everybody who registered
      reserve, record           ├ budget         calls, tokens, bytes
      cancel, finish            └ retry_policies for technical calls inside of the run
"""

from aijobs.harness.budget import BudgetExceeded, RunBudget, RunBudgetLimits, RunUsage
from aijobs.harness.cancellation import CancellationReason, RunCancellation
from aijobs.harness.context import RunContext
from aijobs.harness.lifecycle import RunLifecycle, RunOver, RunState, RunTermination
from aijobs.harness.retry import (
    FailureKind,
    OperationFailed,
    RetryAttempt,
    RetryPolicies,
    RetryPolicy,
    run_with_retry,
)
from aijobs.harness.runs import Harness
from aijobs.harness.tool_keys import ToolCallKeys

__all__ = [
    "BudgetExceeded",
    "CancellationReason",
    "FailureKind",
    "Harness",
    "OperationFailed",
    "RetryAttempt",
    "RetryPolicies",
    "RetryPolicy",
    "RunBudget",
    "RunBudgetLimits",
    "RunCancellation",
    "RunContext",
    "RunLifecycle",
    "RunOver",
    "RunState",
    "RunTermination",
    "RunUsage",
    "ToolCallKeys",
    "run_with_retry",
]
