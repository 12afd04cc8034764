"""Deleting what is old, in small steps (OB-10, AP-7, ruling 32).

    published event       a day after it was published    unless its job waits for just this event
    dead, discarded one   a week after it became so       unless it is dead and its job waits for an operator
    ended job             30 days after its end           with all that belongs to it, but its usage rows; unless a
                                                          retry of it is alive or its end is still to be published
    snapshot              30 days after its job's end     a manual retry is refused then

A transaction deletes one chunk, and other work gets a breath between two. Whatever is decided is decided on locked rows
in the order users, jobs, events, so this may run on every replica at once. Holding the users keeps creates and retries
from answering with a job that is being deleted.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field

from aijobs import metrics
from aijobs.errors import AijobsError, Unavailable
from aijobs.settings import Seconds
from aijobs.states import JobState
from services.jobs.batches import write_each
from services.jobs.events import END_EVENTS, EventType, dispatch_key
from services.jobs.store import jobs as job_store
from services.jobs.store import retention as store
from services.jobs.store import users
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.outbox import EventStatus
from services.jobs.store.retention import EndedJob, OldSnapshot, SettledEvent

#: Events or snapshots in one transaction; of jobs fewer, as each brings about ten rows of other tables.
CHUNK = 200
JOB_CHUNK = 50
#: Between two transactions.
BREATH = timedelta(milliseconds=50)
DELETED = metrics.counter("rows_deleted", "Rows deleted because they were old", "kind")
Age = Annotated[Seconds, Field(ge=timedelta(seconds=1), le=timedelta(days=3650))]
log = structlog.get_logger()


class KeptJobs(BaseModel):
    """How long the ended jobs of one type are kept, by their state; unset: as long as all others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    succeeded: Age | None = None
    failed: Age | None = None
    cancelled: Age | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How long things are kept: events after they were settled, jobs and snapshots after the end of the job."""

    published_events: timedelta = timedelta(days=1)
    dead_events: timedelta = timedelta(days=7)
    jobs: timedelta = timedelta(days=30)
    snapshots: timedelta = timedelta(days=30)
    jobs_by_type: Mapping[str, KeptJobs] = field(default_factory=dict)

    def of_jobs(self, job_type: str, state: JobState) -> timedelta:
        """Return how long jobs of a type are kept that ended in this state."""
        kept = self.jobs_by_type.get(job_type)
        age: timedelta | None = getattr(kept, state, None)
        return self.jobs if age is None else age

    def of_event(self, status: EventStatus) -> timedelta:
        """Return how long events are kept that ended in this status."""
        return self.published_events if status == EventStatus.PUBLISHED else self.dead_events


class Retention:
    """Deletes what is old; `run` is the loop.

    Args:
        database: where it is.
        ages: how long what is kept.
        interval: between two looks.
        breath: between two transactions.

    """

    name = "retention"

    def __init__(self, database: Database, *, ages: Ages, interval: timedelta, breath: timedelta = BREATH) -> None:
        self._database = database
        self._ages = ages
        self._interval = interval
        self._breath = breath

    async def run(self) -> None:
        """Delete until cancelled. Never ends by a fault of the database."""
        while True:
            await asyncio.sleep(self._interval.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311 - spreads
            try:
                await self.prune()
            except Unavailable:
                log.warning("old rows not deleted: the database cannot be reached")

    async def prune(self) -> None:
        """Delete everything that is old by now.

        Raises:
            Unavailable: the database cannot be reached; what was deleted so far stays deleted.

        """
        await self._prune_events()
        for job_type, state in await self._database.read(store.kinds):
            if state.terminal:
                await self._prune_jobs(job_type, state)
        await self._prune_snapshots()

    async def _prune_events(self) -> None:
        last: SettledEvent | None = None

        async def work(tx: Transaction) -> list[SettledEvent]:
            age = min(self._ages.published_events, self._ages.dead_events)
            found = await store.settled_events(tx, age=age, after=last, limit=CHUNK)
            dispatching = {event.aggregate_id for event in found if event.event_type == EventType.ENQUEUE}
            rows = await job_store.get(tx, dispatching) if dispatching else {}
            old = [event for event in found if self._is_old(event, rows.get(event.aggregate_id))]
            _count_later(tx, {"event": await store.delete_events(tx, [event.id for event in old])})
            return found

        while len(found := await self._database.write(work)) == CHUNK:
            last = found[-1]
            await asyncio.sleep(self._breath.total_seconds())

    def _is_old(self, event: SettledEvent, job: JobRow | None) -> bool:
        """Judge an event by its job, which needs no lock: a job that begins to wait gets another dispatch number."""
        if event.settled_at >= event.read_at - self._ages.of_event(event.status):
            return False
        if job is None or not job.waits:
            return True
        # The sweep would take the job's message for lost, or not see why it waits.
        return event.status != EventStatus.DEAD and event.dedupe_key != dispatch_key(job.job_id, job.dispatch_no)

    async def _prune_jobs(self, job_type: str, state: JobState) -> None:
        age = self._ages.of_jobs(job_type, state)
        last: EndedJob | None = None

        async def look(tx: Transaction) -> list[EndedJob]:
            return await store.ended_jobs(tx, job_type=job_type, state=state, age=age, after=last, limit=JOB_CHUNK)

        while found := await self._database.read(look):
            await write_each(self._database, found, _delete_jobs)
            if len(found) < JOB_CHUNK:
                break
            last = found[-1]
            await asyncio.sleep(self._breath.total_seconds())

    async def _prune_snapshots(self) -> None:
        age = self._ages.snapshots
        last: OldSnapshot | None = None

        async def work(tx: Transaction) -> list[OldSnapshot]:
            found = await store.old_snapshots(tx, age=age, after=last, limit=CHUNK)
            _count_later(tx, {"snapshot": await store.delete_snapshots(tx, [old.job_id for old in found], age=age)})
            return found

        while len(found := await self._database.write(work)) == CHUNK:
            last = found[-1]
            await asyncio.sleep(self._breath.total_seconds())


async def _delete_jobs(tx: Transaction, ended: Sequence[EndedJob]) -> list[bool | AijobsError]:
    """Delete jobs unless something still needs them, and say which."""
    await users.lock(tx, {job.user_id for job in ended})
    rows = await job_store.get(tx, [job.job_id for job in ended], lock=True)
    if not rows:  # another replica was here first
        return [False] * len(ended)
    needed = await store.being_retried(tx, list(rows))
    needed |= await store.untold(tx, list(rows), end_types=list(END_EVENTS.values()))
    deleted = rows.keys() - needed
    _count_later(tx, await store.delete_jobs(tx, sorted(deleted)))
    return [job.job_id in deleted for job in ended]


def _count_later(tx: Transaction, counts: Mapping[str, int]) -> None:
    def count() -> None:
        for kind, rows in counts.items():
            DELETED.labels(kind).inc(rows)

    tx.after_commit(count)
