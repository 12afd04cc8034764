"""How many bytes a run may keep: reserved atomically, never in part (HA-5)."""

import threading


class CapacityExceeded(Exception):
    """A reservation does not fit; nothing of it was taken."""


class RunCapacity:
    """Counts the bytes that a run holds, as UTF-8 JSON. May be used from any thread.

    Args:
        limit: bytes, positive.

    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes reserved so far."""
        return self._used

    def reserve(self, size: int) -> int:
        """Take bytes and return how many are taken in all.

        Raises:
            ValueError: the size is negative.
            CapacityExceeded: they do not fit.

        """
        if size < 0:
            raise ValueError(f"size must not be negative: {size}")
        with self._lock:
            if self._used + size > self._limit:
                raise CapacityExceeded(f"{self._used} of {self._limit} bytes are taken; {size} more do not fit")
            self._used += size
            return self._used
