"""Looking for jobs, events and queues that are not as they must be, and repairing what can be (LC-13, OB-3, OB-5).

    a job waits, its event is gone or discarded    it is dispatched again
    a job waits, its event is dead                 the event is requeued
    a job waits, its message was lost              as the sweep judges and does
    a lease ended long ago                         as the reaper does
    no executor, no dispatcher                     told: somebody has to start one
    events of a type that nobody can send          told
    a job ended lately without an event            told

The tables are read in pages, without locks. What was found is looked at a second time before it is told, since jobs go
on meanwhile; a repair judges a third time, on locked rows. So a check is safe while everything runs, and an engine that
is well gets an empty report.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

import structlog

from aijobs.errors import EventNotDead
from services.jobs import events, inspection
from services.jobs.event_queries import EventQueries
from services.jobs.findings import Finding, FindingKind, Report
from services.jobs.lapsing import JobLapsing
from services.jobs.outbox_admin import OutboxAdmin, Outcome
from services.jobs.reconciliation import Reconciliation
from services.jobs.store import jobs as job_store
from services.jobs.store import outbox
from services.jobs.store.database import Database
from services.jobs.store.jobs import JobRow
from services.jobs.store.outbox import Dispatch, EventStatus

#: Jobs that are read in one transaction; those who repair keep their transactions smaller.
CHUNK = 500
#: The end of a job that ended longer ago is not asked for: retention may have removed its event.
LOOK_BACK = timedelta(hours=23)
#: By so much less than events are kept, so that none is deleted while it is looked for.
MARGIN = 23 / 24
log = structlog.get_logger()


def look_back(*kept: timedelta) -> timedelta:
    """Return how long ago jobs may have ended that must have an event, given how long settled events are kept."""
    return min(LOOK_BACK, *(span * MARGIN for span in kept))


class Consistency:
    """Checks the engine.

    Args:
        database: where everything is.
        reconciliation: judges which messages are lost, and dispatches jobs again.
        lapsing: lapses leases.
        outbox_admin: requeues events.
        event_queries: knows which events nobody can send.
        look_back: how long ago jobs may have ended whose end must have an event.

    """

    def __init__(
        self,
        database: Database,
        reconciliation: Reconciliation,
        lapsing: JobLapsing,
        outbox_admin: OutboxAdmin,
        event_queries: EventQueries,
        *,
        look_back: timedelta = LOOK_BACK,
    ) -> None:
        self._database = database
        self._reconciliation = reconciliation
        self._lapsing = lapsing
        self._outbox_admin = outbox_admin
        self._event_queries = event_queries
        self._look_back = look_back

    async def check(self, caller: str, *, repair: bool) -> Report:
        """Check everything, and repair what can be if asked to.

        Raises:
            Unavailable: the database cannot be reached.

        """
        report = Report()
        waiting: Counter[str] = Counter()
        told: set[str] = set()
        for look in (job_store.queued, job_store.lapsed):
            last: JobRow | None = None
            while True:
                page = await self._database.read(partial(look, queue="", after=last, limit=CHUNK, since=None))
                waiting.update(job.queue for job in page if job.due)
                told |= await self._without_event(page, report, caller if repair else None)
                if len(page) < CHUNK:
                    break
                last = page[-1]
        await self._lost_messages(report, told, repair=repair)
        await inspection.overdue_leases(self._database, self._lapsing, report, repair=repair)
        await inspection.unserved_queues(self._database, report, waiting)
        inspection.parked_events(report, await self._event_queries.parked())
        await inspection.ends_without_event(self._database, report, within=self._look_back)
        if report.found:
            log.warning(
                "consistency checked",
                caller=caller,
                left=report.left,
                **{str(kind): count for kind, count in report.found.items()},
            )
        return report

    async def _without_event(self, page: Sequence[JobRow], report: Report, caller: str | None) -> set[str]:
        """Tell of waiting jobs whose event is missing or dead, and repair them for a caller; return their ids."""
        keys = {job.job_id: events.dispatch_key(job.job_id, job.dispatch_no) for job in page}
        found = await self._database.read(lambda tx: outbox.dispatches(tx, list(keys.values())))
        missing, dead = [], []
        for job in page:
            dispatch = found.get(keys[job.job_id])
            if dispatch is None or dispatch.status == EventStatus.DISCARDED:
                missing.append(job)
            elif dispatch.status == EventStatus.DEAD:
                dead.append(job)
        missing, dead = await self._still(missing), await self._still(dead)
        await self._dispatch_again(
            report,
            FindingKind.EVENT_MISSING,
            missing,
            "the event that dispatches it is gone",
            repair=caller is not None,
        )
        await self._requeue(report, dead, {job.job_id: found[keys[job.job_id]] for job in dead}, caller)
        return {job.job_id for job in missing}

    async def _lost_messages(self, report: Report, told: set[str], *, repair: bool) -> None:
        lost = [job for job in await self._reconciliation.lost() if job.job_id not in told]
        for start in range(0, len(lost), CHUNK):
            still = await self._still(lost[start : start + CHUNK])
            problem = "its message was published, and executors are idle without having got it"
            await self._dispatch_again(report, FindingKind.MESSAGE_LOST, still, problem, repair=repair)

    async def _still(self, jobs: Sequence[JobRow]) -> list[JobRow]:
        """Return those jobs that still wait for the same dispatch."""
        if not jobs:
            return []
        rows = await self._database.read(lambda tx: job_store.get(tx, [job.job_id for job in jobs]))
        return [
            job
            for job in jobs
            if (row := rows.get(job.job_id)) is not None and row.waits and row.dispatch_no == job.dispatch_no
        ]

    async def _dispatch_again(
        self, report: Report, kind: FindingKind, jobs: Sequence[JobRow], problem: str, *, repair: bool
    ) -> None:
        results = await self._reconciliation.dispatch_again(jobs) if repair else [None] * len(jobs)
        for job, result in zip(jobs, results, strict=True):
            if result is False:  # it went on meanwhile
                continue
            report.add(
                Finding(
                    kind=kind,
                    job_id=job.job_id,
                    queue=job.queue,
                    problem=f"job {job.job_id} waits: {problem}",
                    advice="it was dispatched again" if result is True else "check with repair: it is dispatched again",
                    repaired=result is True,
                )
            )

    async def _requeue(
        self, report: Report, jobs: Sequence[JobRow], dead: Mapping[str, Dispatch], caller: str | None
    ) -> None:
        ids = {job.job_id: dead[job.job_id].event_id for job in jobs}
        done = {} if caller is None else await self._requeued(caller, list(ids.values()))
        for job in jobs:
            event_id = ids[job.job_id]
            result = done.get(event_id)
            if result is Outcome.DISCARDED or isinstance(result, EventNotDead):  # it went on meanwhile
                continue
            report.add(
                Finding(
                    kind=FindingKind.EVENT_DEAD,
                    job_id=job.job_id,
                    queue=job.queue,
                    problem=f"job {job.job_id} waits: the event that dispatches it is dead",
                    advice="the event was requeued"
                    if result is Outcome.REQUEUED
                    else f"requeue it: aijobs outbox requeue {event_id}",
                    repaired=result is Outcome.REQUEUED,
                )
            )

    async def _requeued(self, caller: str, event_ids: Sequence[str]) -> dict[str, object]:
        return {each.event_id: each.result for each in await self._outbox_admin.requeue(caller, event_ids)}
