"""Following jobs as they change, with any number of replicas (AP-1).

A commit in this process wakes the watchers of its jobs at once. For commits of other replicas one query per 500 ms
asks how far all watched jobs are; it does not run while nobody watches.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import structlog

from aijobs.errors import Unavailable
from services.jobs.queries import JobDetail, JobQueries, Viewer
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import Sign
from services.jobs.wakeups import Wakeups

POLL_INTERVAL = timedelta(milliseconds=500)
KEEP_ALIVE = timedelta(seconds=15)
#: Ids in one query.
CHUNK = 500
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One message of a watch. Neither job nor transition: a keep-alive."""

    detail: JobDetail | None = None
    transition: HistoryRow | None = None


class JobWatching:
    """Serves watches; `run` is the loop that finds other replicas' commits."""

    name = "watch poll"

    def __init__(self, queries: JobQueries, wakeups: Wakeups) -> None:
        self._queries = queries
        self._wakeups = wakeups

    async def run(self) -> None:
        """Poll for changes of watched jobs until cancelled. Never ends by a fault of the database."""
        known: dict[str, Sign] = {}
        while True:
            await asyncio.sleep(POLL_INTERVAL.total_seconds())
            watched = self._wakeups.watched_jobs
            if not watched:
                known = {}
                continue
            try:
                present: dict[str, Sign] = {}
                for start in range(0, len(watched), CHUNK):
                    present |= await self._queries.signs(watched[start : start + CHUNK])
            except Unavailable:
                log.warning("watched jobs not polled: the database cannot be reached")
                continue
            # A job seen for the first time counts as changed: it may have, since its watcher read it.
            self._wakeups.jobs_changed(job_id for job_id, sign in present.items() if known.get(job_id) != sign)
            known = present

    async def watch(
        self, viewer: Viewer, job_id: str, *, after_sequence: int | None, include_progress: bool
    ) -> AsyncIterator[Update]:
        """Yield the present job, then each change in order, and end after the terminal one.

        Args:
            viewer: must be allowed to know of the job.
            job_id: the job.
            after_sequence: also yield past changes with higher numbers; None: only future ones.
            include_progress: also yield when only the progress has moved.

        Raises:
            JobNotFound: no such job, or somebody else's.
            Unavailable: the database cannot be reached.

        """
        signal = self._wakeups.watch(job_id)
        try:
            seen = signal.count
            detail = await self._queries.get(viewer, job_id, full=False)
            yield Update(detail=detail)
            sequence = detail.job.sequence if after_sequence is None else after_sequence
            progress = detail.job.progress
            loop = asyncio.get_running_loop()
            sent = loop.time()
            while True:
                before = (sequence, progress)
                if detail.job.sequence > sequence:
                    transitions = await self._queries.history(job_id, after_sequence=sequence)
                    if transitions and transitions[-1].sequence > detail.job.sequence:
                        # It went on since it was read: no message may show a job older than its transition.
                        detail = await self._queries.get(viewer, job_id, full=False)
                    for transition in transitions:
                        yield Update(detail=detail, transition=transition)
                        sequence = transition.sequence
                    progress = detail.job.progress
                    if transitions and detail.job.sequence > sequence:
                        continue
                elif include_progress and detail.job.progress != progress:
                    progress = detail.job.progress
                    yield Update(detail=detail)
                if detail.job.lifecycle_status.terminal:
                    return
                if (sequence, progress) != before:
                    sent = loop.time()
                silence = timedelta(seconds=loop.time() - sent)
                if silence >= KEEP_ALIVE or not await signal.beyond(seen, KEEP_ALIVE - silence):
                    yield Update()
                    sent = loop.time()
                seen = signal.count
                detail = await self._queries.get(viewer, job_id, full=False)
        finally:
            self._wakeups.unwatch(job_id, signal)
