"""LC-1…LC-9, LC-11, LC-13, CR-2, CR-5, EX-2, PJ-4, OB-2: what holds whoever calls what, in whatever order.

Several actors, some of them late, some repeating what they sent before, call the use cases; after every call all rows
are read and judged. What the machine draws is in `machine/rules.py`, what has to come of it in the actors beside it,
and what holds at any time in `machine/world.py`.
"""

import logging
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from services.jobs.migrate import upgrade
from services.jobs.store.changes import Kind
from tests.conformance.machine.rules import JobMachine
from tests.conformance.machine.stage import Stage

#: What is met within 200 examples, and what within 2,000: a machine that never got there would prove nothing.
SOON = {
    *("create: Created", "create: TOO_MANY_JOBS", "cancel: CancelAnswer", "retry: JobRow", "lock: Locked"),
    *("heartbeat: Extended", "submit: Accepted", "submit: LEASE_LOST", "submit: CANCEL_REQUESTED", "settle: None"),
    *("reap: 1", "sweep: 1", "judge: Verdict.LOST"),
}
SELDOM = {
    *(f"history: {kind}" for kind in Kind),
    *("create: REQUEST_ID_REUSED", "create: IDEMPOTENCY_KEY_REUSED", "cancel: JOB_NOT_CANCELLABLE"),
    *("cancel: REQUEST_ID_REUSED", "retry: JOB_NOT_RETRYABLE", "retry: REQUEST_ID_REUSED", "lock: SESSION_LOST"),
    *("submit: ILLEGAL_TRANSITION", "break: False", "judge: Verdict.THERE", "judge: Verdict.TOO_LATE"),
    *("cancel: JOB_ALREADY_CANCELLED", "retry: RETRY_IN_PROGRESS", "lock: LEASE_CONFLICT", "lock: JOB_NOT_READY"),
    *("lock: ILLEGAL_TRANSITION", "heartbeat: LEASE_LOST", "release claims: 1", "settle: CLAIM_LOST"),
}


@pytest.fixture
def stage(database_url: str) -> Iterator[Stage]:
    """One database for all examples, and silence about what goes wrong on purpose."""
    said = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    upgrade(database_url)
    stage = Stage(database_url)
    yield stage
    stage.close()
    structlog.configure(**said)


def play(stage: Stage, *, examples: int, steps: int, derandomize: bool) -> None:
    """Play examples, and say how many they were and how the calls were answered (`pytest -rP` shows it)."""
    began = time.monotonic()
    play_by = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    # Any callable that makes a machine will do, although its annotation asks for a class.
    run_state_machine_as_test(partial(JobMachine, stage), settings=play_by)  # type: ignore[arg-type]
    calls = sum(stage.calls.values())
    sys.stdout.write(
        f"{stage.examples} examples, {steps} steps each, {calls} calls, {time.monotonic() - began:.1f} s\n"
    )
    sys.stdout.write("".join(f"{number:6} {what}\n" for what, number in sorted(stage.answers.items())))
    expected = (SOON if examples >= 200 else set()) | (SELDOM if examples >= 2000 else set())
    assert sorted(expected - stage.answers.keys()) == []


@pytest.mark.timeout(600)  # what failed is shrunk first
def test_whatever_is_called_in_whatever_order_every_rule_holds(stage: Stage) -> None:
    play(stage, examples=200 if stage.database.sqlite else 20, steps=16, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_orders(stage: Stage) -> None:
    play(stage, examples=2000 if stage.database.sqlite else 200, steps=30, derandomize=False)
