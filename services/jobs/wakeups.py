"""What wakes whoever waits for a commit: dispatchers for events, watchers for jobs, executors' sessions for commands.

In this process a commit wakes them at once. Commits of other replicas are found by polling, which each waiter does by
itself as a fallback.
"""

import asyncio
from collections.abc import Iterable
from datetime import timedelta


class Signal:
    """Counts happenings and lets tasks wait for the next one without missing any in between."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """How often the signal was given; read it before looking, then wait beyond it."""
        return self._count

    def give(self) -> None:
        """Wake everybody who waits."""
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def beyond(self, count: int, within: timedelta) -> bool:
        """Wait until the signal has been given more than `count` times; False if that took too long."""
        try:
            async with asyncio.timeout(within.total_seconds()):
                while self._count <= count:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Wakeups:
    """The signals of this process."""

    def __init__(self) -> None:
        self.events = Signal()
        self.commands = Signal()
        self._watched: dict[str, list[Signal]] = {}

    def watch(self, job_id: str) -> Signal:
        """Return a signal that is given when the job has changed; hand it back with `unwatch`."""
        signal = Signal()
        self._watched.setdefault(job_id, []).append(signal)
        return signal

    def unwatch(self, job_id: str, signal: Signal) -> None:
        """Forget a signal."""
        signals = self._watched[job_id]
        signals.remove(signal)
        if not signals:
            del self._watched[job_id]

    @property
    def watched_jobs(self) -> list[str]:
        """The jobs that somebody watches."""
        return list(self._watched)

    def jobs_changed(self, job_ids: Iterable[str]) -> None:
        """Wake the watchers of these jobs."""
        for job_id in job_ids:
            for signal in self._watched.get(job_id, ()):
                signal.give()
