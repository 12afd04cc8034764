"""Statements on scheduled `outbox_events`: those that wait for their time, out of every claim's way (QU-3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, bindparam, func, select, update

from services.jobs.store.database import Transaction
from services.jobs.store.outbox import EventStatus, events
from services.jobs.store.tables import outbox_events
from services.jobs.store.time import now


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """An event that waits for its time. `rank_at` is None if it never had a place in the order."""

    id: int
    aggregate_id: str
    dedupe_key: str
    queue: str
    rank_at: datetime | None


def _due() -> Select[tuple[Any, ...]]:
    return select(*(events[field.name] for field in fields(ScheduledEvent))).where(events.available_at <= now())


async def due(tx: Transaction, *, limit: int, passed_over: int = 0) -> list[ScheduledEvent]:
    """Read scheduled events whose time has come, the first ones first. No row is locked."""
    statement = _due().order_by(events.available_at, events.id).limit(limit).offset(passed_over)
    return [ScheduledEvent(**row) for row in (await tx.execute(statement)).mappings()]


async def lock_due(tx: Transaction, ids: Sequence[int]) -> list[ScheduledEvent]:
    """Lock those of these events that are still scheduled and due, and read them."""
    statement = _due().where(events.id.in_(sorted(ids))).order_by(events.id)
    if not tx.sqlite:
        statement = statement.with_for_update()
    return [ScheduledEvent(**row) for row in (await tx.execute(statement)).mappings()]


async def until_due(tx: Transaction) -> timedelta | None:
    """Read how long it is until the next scheduled event is due, negative if one is; None: there is none."""
    first, moment = (await tx.execute(select(func.min(events.available_at), now()))).one()
    return None if first is None else first - moment


async def promote(tx: Transaction, ranks: Mapping[int, datetime]) -> None:
    """Make locked scheduled events pending, each at its place in the order."""
    if ranks:
        statement = (
            update(outbox_events)
            .where(events.id == bindparam("g_id"), events.status == EventStatus.SCHEDULED)
            .values(status=EventStatus.PENDING, available_at=None, rank_at=bindparam("v_rank_at"))
        )
        await tx.execute(statement, [{"g_id": id_, "v_rank_at": rank} for id_, rank in ranks.items()])


async def drop(tx: Transaction, ids: Sequence[int]) -> None:
    """Discard locked scheduled events that nobody needs any more."""
    if ids:
        await tx.execute(
            update(outbox_events)
            .where(events.id.in_(ids), events.status == EventStatus.SCHEDULED)
            .values(status=EventStatus.DISCARDED, available_at=None, settled_at=now())
        )
