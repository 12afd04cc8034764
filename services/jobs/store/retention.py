"""Statements that find and delete what is old (OB-10, AP-7). What is old and what is kept, `retention.py` decides.

Every page is read in the order of an index, behind the last row of the page before: what is kept is passed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, Table, and_, delete, or_, select

from aijobs.states import JobState
from services.jobs.store.database import Transaction
from services.jobs.store.outbox import EventStatus
from services.jobs.store.quotas import LIVE
from services.jobs.store.tables import job_artifacts, job_history, job_snapshots, jobs, outbox_events, requests
from services.jobs.store.time import now, now_plus

events = outbox_events.c
#: What belongs to a job, by the name under which its deleted rows are counted; whatever refers to another comes first.
#: The usage ledger is not among it: these rows are accounts.
BELONGINGS: dict[str, tuple[Table, Column[Any]]] = {
    "event": (outbox_events, events.aggregate_id),
    "request": (requests, requests.c.job_id),
    "artifact": (job_artifacts, job_artifacts.c.job_id),
    "snapshot": (job_snapshots, job_snapshots.c.job_id),
    "history": (job_history, job_history.c.job_id),
    "job": (jobs, jobs.c.job_id),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledEvent:
    """An event to which nothing more happens, and the database's time at which it was read."""

    id: int
    event_type: str
    aggregate_id: str
    dedupe_key: str
    status: EventStatus
    settled_at: datetime
    read_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A job that has ended."""

    job_id: str
    user_id: str
    finished_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OldSnapshot:
    """A snapshot of a job that was created long ago; `finished`: it ended long ago too."""

    job_id: str
    created_at: datetime


async def settled_events(
    tx: Transaction, *, age: timedelta, after: SettledEvent | None, limit: int
) -> list[SettledEvent]:
    """Read events that were settled longer than `age` ago and hold them, the oldest first; others' are skipped."""
    columns = (
        *(events.id, events.event_type, events.aggregate_id, events.dedupe_key, events.status, events.settled_at),
        now().label("read_at"),
    )
    statement = select(*columns).where(events.settled_at < now_plus(-age))
    if after is not None:
        statement = statement.where(_behind((events.settled_at, after.settled_at), (events.id, after.id)))
    statement = statement.order_by(events.settled_at, events.id).limit(limit)
    if not tx.sqlite:
        statement = statement.with_for_update(skip_locked=True)
    rows = (await tx.execute(statement)).mappings()
    return [SettledEvent(**{**row, "status": EventStatus(row["status"])}) for row in rows]


async def delete_events(tx: Transaction, ids: Sequence[int]) -> int:
    """Delete events that the transaction holds, and return how many."""
    return await _delete(tx, outbox_events, events.id, ids)


async def kinds(tx: Transaction) -> list[tuple[str, JobState]]:
    """Read which job types there are in which states."""
    found = await tx.execute(select(jobs.c.job_type, jobs.c.lifecycle_status).distinct())
    return [(job_type, JobState(state)) for job_type, state in found]


async def ended_jobs(
    tx: Transaction, *, job_type: str, state: JobState, age: timedelta, after: EndedJob | None, limit: int
) -> list[EndedJob]:
    """Read jobs of a type that ended in a state longer than `age` ago, the oldest first."""
    statement = select(jobs.c.job_id, jobs.c.user_id, jobs.c.finished_at).where(
        jobs.c.job_type == job_type, jobs.c.lifecycle_status == state, jobs.c.finished_at < now_plus(-age)
    )
    if after is not None:
        statement = statement.where(_behind((jobs.c.finished_at, after.finished_at), (jobs.c.job_id, after.job_id)))
    statement = statement.order_by(jobs.c.finished_at, jobs.c.job_id).limit(limit)
    return [EndedJob(**row) for row in (await tx.execute(statement)).mappings()]


async def being_retried(tx: Transaction, job_ids: Sequence[str]) -> set[str]:
    """Return those of these jobs that a retry refers to which has not ended."""
    statement = select(jobs.c.retry_of).where(jobs.c.retry_of.in_(job_ids), jobs.c.lifecycle_status.in_(LIVE))
    return {str(job_id) for job_id in (await tx.execute(statement)).scalars()}


async def untold(tx: Transaction, job_ids: Sequence[str], *, end_types: Sequence[str]) -> set[str]:
    """Hold all events of these jobs, and return the jobs whose end is still to be published."""
    statement = select(events.aggregate_id, events.event_type, events.settled_at).where(
        events.aggregate_id.in_(job_ids)
    )
    return {
        job_id
        for job_id, event_type, settled_at in await tx.execute(statement.with_for_update())
        if event_type in end_types and settled_at is None
    }


async def delete_jobs(tx: Transaction, job_ids: Sequence[str]) -> dict[str, int]:
    """Delete jobs that the transaction holds, with all that belongs to them; return how many rows of each kind."""
    return {kind: await _delete(tx, table, column, job_ids) for kind, (table, column) in BELONGINGS.items()}


async def old_snapshots(tx: Transaction, *, age: timedelta, after: OldSnapshot | None, limit: int) -> list[OldSnapshot]:
    """Read snapshots of jobs that were created longer than `age` ago, the oldest first."""
    snapshots = job_snapshots.c
    statement = select(snapshots.job_id, snapshots.created_at).where(snapshots.created_at < now_plus(-age))
    if after is not None:
        statement = statement.where(_behind((snapshots.created_at, after.created_at), (snapshots.job_id, after.job_id)))
    statement = statement.order_by(snapshots.created_at, snapshots.job_id).limit(limit)
    return [OldSnapshot(**row) for row in (await tx.execute(statement)).mappings()]


async def delete_snapshots(tx: Transaction, job_ids: Sequence[str], *, age: timedelta) -> int:
    """Delete the snapshots of those of these jobs that ended longer than `age` ago, and return how many."""
    if not job_ids:
        return 0
    ended = select(jobs.c.job_id).where(jobs.c.job_id.in_(job_ids), jobs.c.finished_at < now_plus(-age))
    return await _delete(tx, job_snapshots, job_snapshots.c.job_id, (await tx.execute(ended)).scalars().all())


def _behind(first: tuple[Column[Any], datetime], second: tuple[Column[Any], str | int]) -> ColumnElement[bool]:
    """Say that a row comes behind a place in the order of two columns."""
    (time, at), (key, last) = first, second
    return and_(time >= at, or_(time > at, key > last))


async def _delete(tx: Transaction, table: Table, column: Column[Any], keys: Sequence[Any]) -> int:
    if not keys:
        return 0
    return (await tx.execute(delete(table).where(column.in_(sorted(keys))))).rowcount
