"""Renewing the leases of all runs together, and hearing of cancels on the way (LC-6).

One call renews every lease of this executor. Progress that a handler reports goes out early, so that users see it move.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import structlog

from aijobs.errors import AijobsError, JobNotFound, LeaseLost
from aijobs.logs import place_of
from services.executor.leases import Beat, LeasedJob, StopReason, StopSwitch
from services.executor.lifecycle_client import LifecycleClient, Refused

#: Between two calls that only carry progress.
PROGRESS_INTERVAL = timedelta(milliseconds=500)
#: Of the time for which a run may go on without a renewal; three may fail.
LONGEST_SHARE = 0.25
SHORTEST_INTERVAL = timedelta(milliseconds=50)
#: Leases in one call.
CHUNK = 100
MOST_EARLY_CANCELS = 1000
log = structlog.get_logger()


class Heartbeats:
    """A loop that renews leases until cancelled."""

    name = "heartbeats"

    def __init__(self, client: LifecycleClient, interval: timedelta) -> None:
        self._client = client
        self._interval = interval
        self._beats: set[Beat] = set()
        self._progressed = asyncio.Event()
        #: Cancels that came before the answer to the lock of their run did.
        self._early_cancels: deque[tuple[str, int]] = deque(maxlen=MOST_EARLY_CANCELS)
        self._handing_back = False
        self._now = False

    @contextmanager
    def beating(self, leased: LeasedJob) -> Iterator[Beat]:
        """Renew a lease as long as the block runs."""
        beat = Beat(leased.lease, StopSwitch(), self._progressed.set)
        beat.abort_at(leased.abort_at)
        self._keep_up_with(timedelta(seconds=leased.abort_at - asyncio.get_running_loop().time()))
        self._beats.add(beat)
        if (leased.lease.job_id, leased.lease.attempt) in self._early_cancels:
            beat.switch.stop(StopReason.CANCEL_REQUESTED)
        if self._handing_back:
            beat.switch.stop(StopReason.SHUTTING_DOWN)
        try:
            yield beat
        finally:
            beat.settle()
            self._beats.discard(beat)

    def _keep_up_with(self, held_for: timedelta) -> None:
        """Renew more often if leases are shorter than the settings of this executor expect."""
        longest = max(held_for * LONGEST_SHARE, SHORTEST_INTERVAL)
        if self._interval > longest:
            log.warning("leases are short: they are renewed more often", seconds=longest.total_seconds())
            self._interval = longest
            self.renew_now()

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop a run whose cancel was requested, now or when it starts."""
        for beat in self._beats:
            if (beat.lease.job_id, beat.lease.attempt) == (job_id, attempt):
                beat.switch.stop(StopReason.CANCEL_REQUESTED)
                return
        self._early_cancels.append((job_id, attempt))

    def hand_back(self) -> None:
        """Stop every run, and those that are only starting, so that others can go on with them (EX-10)."""
        self._handing_back = True
        for beat in self._beats:
            beat.switch.stop(StopReason.SHUTTING_DOWN)

    def renew_now(self) -> None:
        """Renew all leases without waiting for their time: something happened that may have cost them."""
        self._now = True
        self._progressed.set()

    async def run(self) -> None:
        """Renew leases until cancelled. Never ends by a fault of the jobs service."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval.total_seconds()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0, due - loop.time())):
                    await self._progressed.wait()
                    if not self._now:
                        await asyncio.sleep(PROGRESS_INTERVAL.total_seconds())
            # By the clock, whatever ended the wait: a run that reports progress all the time must not starve others.
            if loop.time() >= due or self._now:
                self._now = False
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
        sent_at = asyncio.get_running_loop().time()
        try:
            results = await self._client.extend(beats, progress)
        except Exception as error:  # noqa: BLE001 - whatever it is, every other lease depends on this loop
            told = error.message if isinstance(error, AijobsError) else place_of(error)
            log.warning("leases not renewed", runs=len(beats), error=told)
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
            if beat in self._beats:
                beat.abort_at(sent_at + result.abort_after.total_seconds())
            if beat.progress == sent:
                beat.progress = None
            if result.cancel_requested:
                beat.switch.stop(StopReason.CANCEL_REQUESTED)
