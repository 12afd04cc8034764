"""Renewing the leases of all runs together, and hearing of cancels on the way (LC-6).

One call renews every lease of this executor. Progress that a handler reports goes out early, so that users see it move.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import structlog

from aijobs.errors import AijobsError, JobNotFound, LeaseLost
from services.executor.leases import Beat, Lease, StopReason, StopSwitch
from services.executor.lifecycle_client import LifecycleClient, Refused

#: Between two calls that only carry progress.
PROGRESS_INTERVAL = timedelta(milliseconds=500)
#: Leases in one call.
CHUNK = 100
log = structlog.get_logger()


class Heartbeats:
    """A loop that renews leases until cancelled."""

    name = "heartbeats"

    def __init__(self, client: LifecycleClient, interval: timedelta) -> None:
        self._client = client
        self._interval = interval
        self._beats: set[Beat] = set()
        self._progressed = asyncio.Event()

    @contextmanager
    def beating(self, lease: Lease) -> Iterator[Beat]:
        """Renew a lease as long as the block runs."""
        beat = Beat(lease, StopSwitch(), self._progressed.set)
        self._beats.add(beat)
        try:
            yield beat
        finally:
            self._beats.discard(beat)

    async def run(self) -> None:
        """Renew leases until cancelled. Never ends by a fault of the jobs service."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval.total_seconds()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0, due - loop.time())):
                    await self._progressed.wait()
                    await asyncio.sleep(PROGRESS_INTERVAL.total_seconds())
            # By the clock, whatever ended the wait: a run that reports progress all the time must not starve others.
            if loop.time() >= due:
                due = loop.time() + self._interval.total_seconds() * random.uniform(0.9, 1.0)  # noqa: S311 - spreads
                await self._renew(list(self._beats))
            else:
                await self._renew([beat for beat in self._beats if beat.progress is not None])

    async def _renew(self, beats: Sequence[Beat]) -> None:
        self._progressed.clear()
        chunks = [beats[start : start + CHUNK] for start in range(0, len(beats), CHUNK)]
        await asyncio.gather(*map(self._renew_chunk, chunks))

    async def _renew_chunk(self, beats: Sequence[Beat]) -> None:
        progress = [beat.progress for beat in beats]
        try:
            results = await self._client.extend(beats, progress)
        except AijobsError as error:
            log.warning("leases not renewed", runs=len(beats), error=error.message)
            return
        for beat, sent, result in zip(beats, progress, results, strict=True):
            if isinstance(result, Refused):
                if beat.reporting or beat not in self._beats:
                    continue
                # Whatever else is wrong, the next heartbeat may put it right.
                lost = result.reason in (LeaseLost.reason, JobNotFound.reason)
                log.warning("lease not renewed", job_id=beat.lease.job_id, reason=result.reason, lost=lost)
                if lost:
                    beat.switch.stop(StopReason.LEASE_LOST)
                continue
            if beat.progress == sent:
                beat.progress = None
            if result.cancel_requested:
                beat.switch.stop(StopReason.CANCEL_REQUESTED)
