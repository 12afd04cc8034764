"""Telling a run to stop: the first reason wins, and everybody who registered hears of it once (HA-3).

Cancelling is cooperative. A call that has been entered already stops only if whoever made it registered a callback that
ends it: closes the connection, cancels the task, kills the process.
"""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from itertools import count

logger = logging.getLogger(__name__)


class CancellationReason(StrEnum):
    """Why a run is cancelled."""

    CLIENT_DISCONNECTED = "CLIENT_DISCONNECTED"
    USER_REQUESTED = "USER_REQUESTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    INTERNAL_FAILURE = "INTERNAL_FAILURE"


class RunCancellation:
    """The cancel signal of one run. May be used from any thread.

    Args:
        notify: calls what it is given, where callbacks belong; by default at once, in the thread that cancels.

    """

    def __init__(self, notify: Callable[[Callable[[], None]], None] | None = None) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._reason: CancellationReason | None = None
        self._numbers = count()
        self._callbacks: dict[int, Callable[[CancellationReason], None]] = {}

    @property
    def reason(self) -> CancellationReason | None:
        """The first reason; None while the run is not cancelled."""
        return self._reason

    @property
    def cancelled(self) -> bool:
        """Whether the run is cancelled."""
        return self._reason is not None

    def cancel(self, reason: CancellationReason) -> bool:
        """Cancel the run and call every callback, in the order of their registration.

        A callback that raises is logged, and the others are called all the same.

        Returns:
            True if this call cancelled the run; False if it was cancelled before, which keeps its reason.

        """
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            told = partial(_call, callback, reason)
            if self._notify is None:
                told()
            else:
                self._notify(told)
        return True

    def on_cancel(self, callback: Callable[[CancellationReason], None]) -> Callable[[], None]:
        """Register a callback; it is called once, when the run is cancelled, or at once if it is already.

        Returns:
            A function that takes the registration back. Without effect once the callback has been called.

        """
        with self._lock:
            reason = self._reason
            number = next(self._numbers)
            if reason is None:
                self._callbacks[number] = callback
        if reason is not None:
            _call(callback, reason)

        def forget() -> None:
            with self._lock:
                self._callbacks.pop(number, None)

        return forget


def _call(callback: Callable[[CancellationReason], None], reason: CancellationReason) -> None:
    try:
        callback(reason)
    except BaseException as error:  # noqa: BLE001 - one broken callback must not keep the others from being called
        # Its message may repeat anything (AP-6).
        logger.error("a cancel callback failed: %s", type(error).__name__)
