"""The parts of a consistency check that are not about waiting jobs: leases, who serves the queues, events, ends."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from functools import partial

from aijobs.definition import Queue
from aijobs.states import JobState
from services.jobs import events
from services.jobs.findings import Finding, FindingKind, Report
from services.jobs.lapsing import JobLapsing
from services.jobs.store import consistency as store
from services.jobs.store import dispatchers, executors, queues, retention
from services.jobs.store import jobs as job_store
from services.jobs.store.consistency import EndedJob
from services.jobs.store.database import Database, Transaction

#: Rows that are read in one transaction; those who repair keep their transactions smaller.
CHUNK = 500
#: An executor reports every 5 s, a dispatcher gives a sign of life twice a second.
FRESH_SIGN = timedelta(seconds=15)


async def overdue_leases(database: Database, lapsing: JobLapsing, report: Report, *, repair: bool) -> None:
    """Tell of running jobs whose lease ended longer ago than the reaper takes; repair: lapse them.

    Raises:
        Unavailable: the database cannot be reached.

    """
    passed_over = 0
    while True:
        look = partial(job_store.expired_leases, grace=lapsing.overdue_after, limit=CHUNK, passed_over=passed_over)
        ids = await database.read(look)
        results = await lapsing.lapse_expired_of(ids) if repair else [None] * len(ids)
        for job_id, result in zip(ids, results, strict=True):
            if result is False:  # a heartbeat or the reaper came in between
                continue
            report.add(
                Finding(
                    kind=FindingKind.LEASE_OVERDUE,
                    job_id=job_id,
                    problem=f"job {job_id} runs on a lease that ended long ago, and no reaper ended the run",
                    advice="its lease lapsed"
                    if result is True
                    else "see whether a jobs service runs without errors; check with repair: the lease lapses",
                    repaired=result is True,
                )
            )
        passed_over += len(ids) - sum(result is True for result in results)
        if len(ids) < CHUNK:
            return


async def unserved_queues(database: Database, report: Report, waiting: Mapping[str, int]) -> None:
    """Tell of queues in which something waits, but which no executor or no dispatcher serves.

    Args:
        database: where they are.
        report: is told.
        waiting: how many jobs wait and are due, by queue.

    Raises:
        Unavailable: the database cannot be reached.

    """

    async def look(tx: Transaction) -> tuple[set[str], set[str], bool, frozenset[str]]:
        present = [
            executor
            for executor in await executors.latest(tx, within=FRESH_SIGN)
            if executor.disconnected_at is None and executor.drain_requested_at is None
        ]
        served = {load.queue for executor in present for load in executor.queues}
        paused = {name for name, row in (await queues.every(tx)).items() if row.paused_at is not None}
        dispatched = await dispatchers.any_seen(tx, within=FRESH_SIGN)
        return served, paused, dispatched, await store.with_pending(tx, ("", *Queue))

    served, paused, dispatched, pending = await database.read(look)
    for queue in sorted(set(waiting) - paused - served):
        report.add(
            Finding(
                kind=FindingKind.NO_EXECUTOR,
                queue=queue,
                problem=f"{waiting[queue]} jobs wait in queue {queue}, and no connected executor takes jobs of it",
                advice="start an executor with slots for it, or see why those that run are away: aijobs executors list",
            )
        )
    for queue in sorted((set(waiting) | pending) - paused) if not dispatched else ():
        what = f"events or jobs of queue {queue}" if queue else "events that tell of ends"
        report.add(
            Finding(
                kind=FindingKind.NO_DISPATCHER,
                queue=queue,
                problem=f"{what} wait, and no dispatcher was seen for {FRESH_SIGN.total_seconds():g} s",
                advice="start a dispatcher, or see in its log why it does not reach the jobs service",
            )
        )


def parked_events(report: Report, parked: Mapping[str, int]) -> None:
    """Tell of pending events, counted by type, that no dispatcher can send (OB-5)."""
    for event_type, count in sorted(parked.items()):
        report.add(
            Finding(
                kind=FindingKind.EVENTS_PARKED,
                problem=f"{count} events of type {event_type} wait, and no dispatcher can send this type",
                advice="start dispatchers of the version that can, or give the events up: aijobs outbox discard",
            )
        )


async def ends_without_event(database: Database, report: Report, *, within: timedelta) -> None:
    """Tell of jobs that ended within a span without an event that tells of it (OB-8).

    Raises:
        Unavailable: the database cannot be reached.

    """
    for job_type, state in await database.read(retention.kinds):
        if state.terminal:
            look = partial(store.ended, job_type=job_type, state=state, within=within, limit=CHUNK)
            await _ends_of_a_kind(database, report, state, look)


async def _ends_of_a_kind(
    database: Database, report: Report, state: JobState, look: Callable[..., Awaitable[list[EndedJob]]]
) -> None:
    last: EndedJob | None = None
    while True:
        page = await database.read(partial(look, after=last))
        keys = {job.job_id: events.end_key(job.job_id, state, job.dispatch_no) for job in page}
        present = await database.read(partial(store.present_keys, dedupe_keys=list(keys.values())))
        for job in page:
            if keys[job.job_id] not in present:
                report.add(
                    Finding(
                        kind=FindingKind.END_EVENT_MISSING,
                        job_id=job.job_id,
                        queue=job.queue,
                        problem=f"job {job.job_id} has ended ({state}), and no event tells of it",
                        advice="tell those who wait for its end; this is a bug, or somebody deleted rows by hand",
                    )
                )
        if len(page) < CHUNK:
            return
        last = page[-1]
