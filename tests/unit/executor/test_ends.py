"""HA-8: what each end of an execution's run makes of the job. One table, one test."""

from collections.abc import Callable

import pytest

from aijobs.harness import BudgetExceeded, CancellationReason, RunContext
from services.executor.engine.ends import CANCELS, outcome_of
from services.executor.leases import StopReason
from services.executor.outcomes import Abandoned, Cancelled, Failed, Outcome, Released, Succeeded
from tests.unit.harness.building import LIMITS, build

HARNESS = build()
DONE = Succeeded(output_json="{}", output_hash="h")
FAILED = Failed(execution=2, code="PROVIDER_TIMEOUT", internal="")
NOTHING = Failed(execution=2, code="INTERNAL_ENGINE_ERROR", internal="cancelled")


def _stop(reason: StopReason) -> Callable[[RunContext], object]:
    return lambda run: HARNESS.cancel(run, CANCELS[reason].reason)


def _overspend(run: RunContext) -> None:
    with pytest.raises(BudgetExceeded):
        HARNESS.record_tokens(run, input_tokens=LIMITS.input_tokens + 1, output_tokens=0)


@pytest.mark.parametrize(
    ("end", "detail", "stopped", "outcome"),
    [
        (HARNESS.succeed, DONE, None, DONE),
        # A result that is there is not thrown away because the process ends.
        (HARNESS.succeed, DONE, StopReason.SHUTTING_DOWN, DONE),
        (lambda run: HARNESS.fail(run, FAILED.code), FAILED, None, FAILED),
        (_stop(StopReason.CANCEL_REQUESTED), NOTHING, StopReason.CANCEL_REQUESTED, Cancelled()),
        # A result that comes after the cancel is none.
        (_stop(StopReason.CANCEL_REQUESTED), DONE, StopReason.CANCEL_REQUESTED, Cancelled()),
        (
            _stop(StopReason.SHUTTING_DOWN),
            NOTHING,
            StopReason.SHUTTING_DOWN,
            Released(reason="executor shutting down"),
        ),
        (_stop(StopReason.LEASE_LOST), NOTHING, StopReason.LEASE_LOST, Abandoned()),
        # Lost while it was being given back: no longer ours to say.
        (_stop(StopReason.SHUTTING_DOWN), NOTHING, StopReason.LEASE_LOST, Abandoned()),
        (
            lambda run: HARNESS.cancel(run, CancellationReason.DEADLINE_EXCEEDED),
            NOTHING,
            None,
            Failed(execution=2, code="TIMEOUT", internal="not done by 2026-03-29T00:31:00+00:00"),
        ),
        (
            _overspend,
            NOTHING,
            None,
            Failed(execution=2, code="BUDGET_EXHAUSTED", internal="input_tokens: 101 wanted, 100 allowed"),
        ),
        # A handler that cancels its own run.
        (
            lambda run: HARNESS.cancel(run, CancellationReason.USER_REQUESTED),
            NOTHING,
            None,
            Failed(execution=2, code="INTERNAL_RUN_CANCELLED", internal="the run is CANCELLED"),
        ),
    ],
)
def test_an_end(
    end: Callable[[RunContext], object], detail: Succeeded | Failed, stopped: StopReason | None, outcome: Outcome
) -> None:
    run = HARNESS.start("job-1", run_id="job-1.1.2")
    end(run)
    assert outcome_of(run, detail, 2, stopped) == outcome


def test_every_reason_to_stop_has_its_place_in_the_table() -> None:
    assert set(CANCELS) == set(StopReason)
