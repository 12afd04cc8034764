"""Clocks that are injected where time matters to one process. What matters to several is the database's (ruling 16)."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


def steady_clock() -> Callable[[], datetime]:
    """Return a clock that goes on evenly from the time of its making, whoever sets the host's: deadlines stay put."""
    offset = datetime.now(UTC) - timedelta(seconds=time.monotonic())
    return lambda: offset + timedelta(seconds=time.monotonic())
