"""Repeating what may be repeated, for a bounded time.

Every call of the contract is safe to repeat (ruling 33). What is worth repeating is transient: nobody answered, or not
in time, the service is stopping or busy, or its database is away.
"""

import asyncio
import random
from datetime import timedelta

from aijobs.errors import AijobsError

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 2.0


class Patience:
    """How long to go on after failures. It starts to run with the first failure and is renewed by success.

    Args:
        limit: how long; zero repeats nothing.

    """

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit.total_seconds()
        self._failing_since: float | None = None
        self._wait = _FIRST_WAIT

    def renew(self) -> None:
        """Forget earlier failures: something was answered."""
        self._failing_since = None
        self._wait = _FIRST_WAIT

    async def after(self, error: AijobsError) -> None:
        """Wait before the next try, longer each time, or give up.

        Raises:
            AijobsError: `error` itself, if it is not worth another try or the time is over.

        """
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        left = self._failing_since + self._limit - now
        if not error.transient or left <= 0:
            raise error
        wait = self._wait if error.retry_after is None else error.retry_after.total_seconds()
        # Spread, so that the clients of a restarted service do not come back all at once.
        await asyncio.sleep(min(wait * random.uniform(0.5, 1.0), left))  # noqa: S311 - no secret
        self._wait = min(self._wait * 2, _LONGEST_WAIT)
