"""Statements on `outbox_events`.

    pending ──claim──▶ processing ──published──▶ published
       ▲                   │
       ├──released/expired─┤        costs no attempt: nobody's fault
       └──failed───────────┴──attempt 3──▶ dead

Every write after the claim is guarded by the claim token: a dispatcher whose claim ended can settle nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import BindParameter, bindparam, case, func, insert, or_, select, update

from services.jobs.store.database import Transaction
from services.jobs.store.tables import outbox_events
from services.jobs.store.time import UtcTime, now, now_plus

events = outbox_events.c


class EventStatus(StrEnum):
    """Where an event is."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    PROCESSING = "processing"
    PUBLISHED = "published"
    DEAD = "dead"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to write. The payload holds ids and codes only (OB-1).

    Attributes:
        queue: the queue whose pause holds the event back; empty for events that no pause concerns.
        available_at: when it may be claimed; None: at once.

    """

    event_id: str
    event_type: str
    aggregate_type: str
    aggregate_id: str
    dedupe_key: str
    payload_json: str
    queue: str = ""
    available_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event as a dispatcher gets it."""

    event_id: str
    event_type: str
    aggregate_type: str
    aggregate_id: str
    dedupe_key: str
    payload_json: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimState:
    """What a settle needs to know of an event."""

    status: EventStatus
    claim_token: str | None
    attempt_count: int


async def append(tx: Transaction, new: Sequence[NewEvent]) -> None:
    """Insert pending events. A conflict of the dedupe key aborts the transaction (ruling 20)."""
    rows: list[dict[str, Any]] = [
        {field.name: getattr(event, field.name) for field in fields(NewEvent)}
        | {"status": EventStatus.PENDING, "attempt_count": 0}
        for event in new
    ]
    if rows:
        available: BindParameter[datetime] = bindparam("available_at", type_=UtcTime())
        at = func.coalesce(available, now(), type_=UtcTime())
        await tx.execute(insert(outbox_events).values(available_at=at, created_at=now()), rows)


async def claimed(tx: Transaction, claim_token: str) -> list[EventRow]:
    """Read the events that a claim token holds."""
    statement = select(events.id, *(events[field.name] for field in fields(EventRow))).where(
        events.claim_token == claim_token, events.status == EventStatus.PROCESSING
    )
    found = sorted((await tx.execute(statement)).all(), key=lambda row: int(row[0]))
    return [EventRow(**dict(zip((field.name for field in fields(EventRow)), row[1:], strict=True))) for row in found]


async def renew(tx: Transaction, claim_token: str, span: timedelta) -> list[EventRow]:
    """Let a claim begin anew, and read the events that it holds."""
    renewed = await tx.execute(
        update(outbox_events)
        .where(events.claim_token == claim_token, events.status == EventStatus.PROCESSING)
        .values(claim_until=now_plus(span))
    )
    return await claimed(tx, claim_token) if renewed.rowcount else []


async def claim(
    tx: Transaction,
    *,
    claim_token: str,
    dispatcher_id: str,
    event_types: Sequence[str],
    queues: Sequence[str],
    limit: int,
    span: timedelta,
) -> list[EventRow]:
    """Claim the oldest due events of these types for `span`, skipping those that another claim holds just now.

    Each queue is asked by itself, in the given order: so the order of its events is that of an index, and a paused
    queue is left out without passing over its events.
    """
    ids: list[int] = []
    for queue in queues:
        due = (
            select(events.id)
            .where(
                events.status == EventStatus.PENDING,
                events.queue == queue,
                events.available_at <= now(),
                events.event_type.in_(event_types),
                # Settled under this very token already: the claim is a late copy, and its answer goes to nobody.
                or_(events.claim_token.is_(None), events.claim_token != claim_token),
            )
            .order_by(events.available_at, events.id)
            .limit(limit - len(ids))
        )
        if not tx.sqlite:
            due = due.with_for_update(skip_locked=True)
        ids += (await tx.execute(due)).scalars().all()
        if len(ids) == limit:
            break
    if not ids:
        return []
    await tx.execute(
        update(outbox_events)
        .where(events.id.in_(ids), events.status == EventStatus.PENDING)
        .values(
            status=EventStatus.PROCESSING,
            claim_token=claim_token,
            locked_by=dispatcher_id,
            claim_until=now_plus(span),
        )
    )
    return await claimed(tx, claim_token)


async def claim_states(tx: Transaction, event_ids: Sequence[str]) -> dict[str, ClaimState]:
    """Lock events in the order of their ids and read who holds them."""
    statement = (
        select(events.event_id, events.status, events.claim_token, events.attempt_count)
        .where(events.event_id.in_(sorted(set(event_ids))))
        .order_by(events.event_id)
    )
    if not tx.sqlite:
        statement = statement.with_for_update()
    return {
        event_id: ClaimState(status=EventStatus(status), claim_token=token, attempt_count=attempts)
        for event_id, status, token, attempts in await tx.execute(statement)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What to write about a claimed event. `delay` postpones its next claim."""

    event_id: str
    status: EventStatus
    attempt_count: int
    last_error: str | None
    delay: timedelta = timedelta(0)


async def settle(tx: Transaction, claim_token: str, settlements: Sequence[Settlement]) -> None:
    """Settle events that the claim token holds. They keep the token, so that a repeated settle is recognised."""
    if not settlements:
        return
    to_status: BindParameter[str] = bindparam("v_status")
    statement = (
        update(outbox_events)
        .where(
            events.event_id == bindparam("g_event_id"),
            events.claim_token == claim_token,
            events.status == EventStatus.PROCESSING,
        )
        .values(
            attempt_count=bindparam("v_attempt_count"),
            last_error=bindparam("v_last_error"),
            claim_until=None,
            published_at=case((to_status == EventStatus.PUBLISHED, now()), else_=None),
            status=to_status,
        )
    )
    for delay in sorted({settlement.delay for settlement in settlements}):
        delayed = statement.values(available_at=now_plus(delay)) if delay else statement
        await tx.execute(
            delayed,
            [
                {
                    "g_event_id": settlement.event_id,
                    "v_status": settlement.status,
                    "v_attempt_count": settlement.attempt_count,
                    "v_last_error": settlement.last_error,
                }
                for settlement in settlements
                if settlement.delay == delay
            ],
        )


async def release_expired(tx: Transaction, limit: int) -> int:
    """Give back events whose claim has ended, and return how many. Costs them no attempt (OB-3)."""
    statement = (
        select(events.id)
        .where(events.status == EventStatus.PROCESSING, events.claim_until < now())
        .order_by(events.claim_until)
        .limit(limit)
    )
    if not tx.sqlite:
        statement = statement.with_for_update(skip_locked=True)
    ids = (await tx.execute(statement)).scalars().all()
    if ids:
        await tx.execute(
            update(outbox_events)
            .where(events.id.in_(ids), events.status == EventStatus.PROCESSING)
            .values(status=EventStatus.PENDING, claim_token=None, locked_by=None, claim_until=None)
        )
    return len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Where an enqueue event is."""

    status: EventStatus
    published_at: datetime | None


async def dispatches(tx: Transaction, dedupe_keys: Sequence[str]) -> dict[str, Dispatch]:
    """Read where events are, by their dedupe keys; those that are gone are missing in the answer."""
    statement = select(events.dedupe_key, events.status, events.published_at).where(events.dedupe_key.in_(dedupe_keys))
    return {
        key: Dispatch(status=EventStatus(status), published_at=published_at)
        for key, status, published_at in await tx.execute(statement)
    }
