"""Waiting between tries of something that is broken elsewhere."""

import asyncio
import random
from datetime import timedelta


class Backoff:
    """Pauses that double while something stays broken, and start small again once it works.

    Args:
        first: the first pause.
        longest: no pause is longer.

    """

    def __init__(
        self, first: timedelta = timedelta(milliseconds=100), longest: timedelta = timedelta(seconds=5)
    ) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    async def wait(self) -> None:
        """Pause, give or take a fifth so that many waiters spread."""
        await asyncio.sleep(self._next.total_seconds() * random.uniform(0.8, 1.2))  # noqa: S311 - guards nothing
        self._next = min(self._next * 2, self._longest)

    def reset(self) -> None:
        """Start small again."""
        self._next = self._first
