"""Statements on `outbox_events` for operators: looking at events, requeueing dead ones, giving events up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import Select, func, select, update

from services.jobs.store.database import Transaction
from services.jobs.store.outbox import EventStatus
from services.jobs.store.tables import outbox_events
from services.jobs.store.time import now

events = outbox_events.c
#: Only claimed events have a claim that ends: all others of a status stand in this index in the order of their ids.
BY_STATUS = "FORCE INDEX (ix_outbox_events_status_claim_until)"
BY_JOB = "FORCE INDEX (ix_outbox_events_aggregate_id)"
#: What an operator can still give up.
DISCARDABLE = (EventStatus.DEAD, EventStatus.PENDING, EventStatus.SCHEDULED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDetail:
    """An event as operators see it; `id` is its place in the order in which events were written."""

    id: int
    event_id: str
    event_type: str
    aggregate_id: str
    dedupe_key: str
    payload_json: str
    queue: str
    status: EventStatus
    attempt_count: int
    last_error: str | None
    locked_by: str | None
    created_at: datetime
    available_at: datetime | None
    settled_at: datetime | None
    claim_until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events; empty fields select everything."""

    event_type: str = ""
    queue: str = ""
    job_id: str = ""


def _select(wanted: EventFilter) -> Select[tuple[object, ...]]:
    statement = select(*(events[field.name] for field in fields(EventDetail)))
    for column, value in (
        (events.event_type, wanted.event_type),
        (events.queue, wanted.queue),
        (events.aggregate_id, wanted.job_id),
    ):
        if value:
            statement = statement.where(column == value)
    return statement


async def _details(tx: Transaction, statement: Select[tuple[object, ...]]) -> list[EventDetail]:
    rows = (await tx.execute(statement)).mappings()
    return [EventDetail(**{**row, "status": EventStatus(row["status"])}) for row in map(dict, rows)]


async def page(
    tx: Transaction,
    wanted: EventFilter,
    *,
    statuses: Sequence[EventStatus] = (),
    before: int | None = None,
    limit: int,
) -> list[EventDetail]:
    """Read the newest events that fit all given filters, written before the one with the id `before`.

    Each status is asked for by itself, so that the order of the answer is that of an index. Of those that dispatchers
    hold just now, which are few, all are read.
    """
    statement = _select(wanted)
    if before is not None:
        statement = statement.where(events.id < before)
    newest = statement.order_by(events.id.desc()).limit(limit)
    if wanted.job_id:
        if statuses:
            newest = newest.where(events.status.in_(statuses))
        return await _details(tx, newest.with_hint(outbox_events, BY_JOB, "mysql"))
    if not statuses:
        return await _details(tx, newest)
    rows: list[EventDetail] = []
    for status in statuses:
        mine = (
            statement if status == EventStatus.PROCESSING else newest.where(events.claim_until.is_(None))
        ).with_hint(outbox_events, BY_STATUS, "mysql")
        rows += await _details(tx, mine.where(events.status == status))
    return sorted(rows, key=lambda row: row.id, reverse=True)[:limit]


async def dead(tx: Transaction, wanted: EventFilter, *, after: int, limit: int) -> list[EventDetail]:
    """Read the oldest dead events that fit the filter, written after the one with the id `after`."""
    statement = _select(wanted).where(events.status == EventStatus.DEAD, events.claim_until.is_(None))
    ordered = statement.where(events.id > after).order_by(events.id).limit(limit)
    return await _details(tx, ordered.with_hint(outbox_events, BY_JOB if wanted.job_id else BY_STATUS, "mysql"))


async def counts(tx: Transaction, *, statuses: Iterable[EventStatus], most: int) -> dict[EventStatus, int]:
    """Count the events of each of these statuses, none further than `most`."""
    found = {}
    for status in statuses:
        first = select(events.id).where(events.status == status).limit(most).subquery()
        found[status] = int((await tx.execute(select(func.count()).select_from(first))).scalar_one())
    return found


async def find(tx: Transaction, event_ids: Iterable[str]) -> dict[str, EventDetail]:
    """Read events; unknown ones are missing in the answer. No row is locked."""
    statement = _select(EventFilter()).where(events.event_id.in_(sorted(set(event_ids))))
    return {event.event_id: event for event in await _details(tx, statement)}


async def lock(tx: Transaction, ids: Iterable[int]) -> dict[str, EventDetail]:
    """Hold events until the transaction ends, and read them. Their jobs must be held already."""
    statement = _select(EventFilter()).where(events.id.in_(sorted(set(ids)))).order_by(events.id)
    if not tx.sqlite:
        statement = statement.with_for_update()
    return {event.event_id: event for event in await _details(tx, statement)}


async def requeue(tx: Transaction, ids: Sequence[int]) -> None:
    """Make locked dead events pending, with all attempts before them, at the places that they have.

    They keep the claim token, so that a late copy of the claim under which they died takes none of them.
    """
    if ids:
        await tx.execute(
            update(outbox_events)
            .where(events.id.in_(ids), events.status == EventStatus.DEAD)
            .values(status=EventStatus.PENDING, attempt_count=0, settled_at=None)
        )


async def discard(tx: Transaction, ids: Sequence[int]) -> None:
    """Give up locked events that nobody holds and that were not published."""
    if ids:
        await tx.execute(
            update(outbox_events)
            .where(events.id.in_(ids), events.status.in_(DISCARDABLE))
            .values(status=EventStatus.DISCARDED, available_at=None, settled_at=now())
        )
