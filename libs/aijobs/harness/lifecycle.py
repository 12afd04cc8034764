"""The life of one run in memory: RUNNING, then exactly one end that nothing changes (HA-4)."""

import threading
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class RunState(StrEnum):
    """Where a run is."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTermination:
    """How a run ended.

    Attributes:
        state: anything but RUNNING.
        reason: a code, for example of the failure taxonomy or a `CancellationReason`.
        at: when, aware.
        detail: for operators, for example which limit was reached; never what a user or a model wrote.

    Raises:
        ValueError: RUNNING is no end.

    """

    state: RunState
    reason: str
    at: datetime
    detail: str = ""

    def __post_init__(self) -> None:
        if self.state is RunState.RUNNING:
            raise ValueError("a run does not end RUNNING")


class RunOver(Exception):
    """A boundary was reached by a run that has ended. Attribute `termination`: how."""

    def __init__(self, termination: RunTermination) -> None:
        super().__init__(f"the run has ended: {termination.state}, {termination.reason}")
        self.termination = termination


class RunLifecycle:
    """The state of one run. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._termination: RunTermination | None = None

    @property
    def state(self) -> RunState:
        """The present state."""
        return RunState.RUNNING if self._termination is None else self._termination.state

    @property
    def termination(self) -> RunTermination | None:
        """How the run ended; None while it is RUNNING."""
        return self._termination

    def finish(self, termination: RunTermination) -> bool:
        """End the run.

        Returns:
            True if this call ended it; False if it had ended, which changes nothing.

        """
        with self._lock:
            if self._termination is not None:
                return False
            self._termination = termination
            return True
