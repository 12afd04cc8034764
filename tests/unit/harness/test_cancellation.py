"""Cancelling: the first reason, and each callback once (HA-3)."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from aijobs.harness import CancellationReason, RunCancellation
from tests.unit.harness.building import at_once

USER, DEADLINE = CancellationReason.USER_REQUESTED, CancellationReason.DEADLINE_EXCEEDED


def test_the_first_reason_wins() -> None:
    cancellation = RunCancellation()
    assert (cancellation.cancelled, cancellation.reason) == (False, None)
    assert cancellation.cancel(USER)
    assert not cancellation.cancel(DEADLINE)
    assert (cancellation.cancelled, cancellation.reason) == (True, USER)


def test_callbacks_are_called_once_each_in_order() -> None:
    cancellation = RunCancellation()
    called: list[tuple[str, CancellationReason]] = []
    for name in "abc":
        cancellation.on_cancel(lambda reason, name=name: called.append((name, reason)))  # type: ignore[misc]
    cancellation.cancel(USER)
    cancellation.cancel(DEADLINE)
    assert called == [("a", USER), ("b", USER), ("c", USER)]


def test_a_failing_callback_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    cancellation = RunCancellation()
    called: list[CancellationReason] = []

    def fail(_: CancellationReason) -> None:
        raise RuntimeError("sk-canary")

    cancellation.on_cancel(fail)
    cancellation.on_cancel(called.append)
    assert cancellation.cancel(USER)
    assert called == [USER]
    # What its message repeats is nobody's to log (AP-6).
    assert caplog.messages == ["a cancel callback failed: RuntimeError"]
    assert "sk-canary" not in caplog.text


def test_a_late_callback_is_called_at_once() -> None:
    cancellation = RunCancellation()
    cancellation.cancel(DEADLINE)
    called: list[CancellationReason] = []
    cancellation.on_cancel(called.append)
    assert called == [DEADLINE]


def test_a_registration_can_be_taken_back() -> None:
    cancellation = RunCancellation()
    called: list[str] = []
    forget = cancellation.on_cancel(lambda _: called.append("gone"))
    cancellation.on_cancel(lambda _: called.append("stays"))
    forget()
    forget()
    cancellation.cancel(USER)
    assert called == ["stays"]


def test_a_callback_may_cancel_and_register_itself() -> None:
    cancellation = RunCancellation()
    called: list[str] = []

    def again(_: CancellationReason) -> None:
        assert not cancellation.cancel(DEADLINE)
        cancellation.on_cancel(lambda _: called.append("late"))

    cancellation.on_cancel(again)
    cancellation.cancel(USER)
    assert called == ["late"]


def test_registering_while_cancelling_loses_no_callback() -> None:
    for _ in range(200):
        cancellation = RunCancellation()
        called: list[CancellationReason] = []
        at_once(
            partial(cancellation.on_cancel, called.append),
            partial(cancellation.cancel, USER),
            partial(cancellation.on_cancel, called.append),
        )
        assert called == [USER, USER]


def test_callbacks_are_called_where_they_belong() -> None:
    posted: list[Callable[[], None]] = []
    cancellation = RunCancellation(posted.append)
    called: list[CancellationReason] = []
    cancellation.on_cancel(called.append)
    cancellation.cancel(USER)
    assert called == []
    posted.pop()()
    assert (called, posted) == ([USER], [])


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), asyncio.CancelledError()])
def test_not_even_such_a_callback_stops_the_others(error: BaseException) -> None:
    cancellation = RunCancellation()
    called: list[CancellationReason] = []

    def fail(_: CancellationReason) -> None:
        raise error

    cancellation.on_cancel(fail)
    cancellation.on_cancel(called.append)
    cancellation.cancel(USER)
    assert called == [USER]
