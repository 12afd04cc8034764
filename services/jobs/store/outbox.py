"""Statements on `outbox_events`.

    scheduled ──due──▶ pending ──claim──▶ processing ──published──▶ published
        ▲                 ▲                  │ │ │
        │                 └──claim ended─────┘ │ └──attempt 3──▶ dead ──requeued──▶ pending
        └──given back, or failed───────────────┘                  └──discarded by an operator

Pending means due. Events of a queue are claimed in the order of their ranks, and a claim looks at each pair of queue
and event type by itself: so the order is that of an index, and neither a paused queue nor events of a type that no
dispatcher can send are passed over again and again.

Every write after the claim is guarded by the claim token: a dispatcher whose claim ended can settle nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Select, bindparam, func, insert, literal, or_, select, union_all, update

from services.jobs.store.database import Transaction
from services.jobs.store.tables import outbox_events
from services.jobs.store.time import now, now_plus

events = outbox_events.c


class EventStatus(StrEnum):
    """Where an event is."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    PROCESSING = "processing"
    PUBLISHED = "published"
    DEAD = "dead"
    DISCARDED = "discarded"


#: Nothing more happens to an event by itself once it is one of these.
SETTLED = (EventStatus.PUBLISHED, EventStatus.DEAD, EventStatus.DISCARDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to write. The payload holds ids and codes only (OB-1).

    Attributes:
        queue: the queue whose order, pause and depth concern the event; empty for events of no queue.
        rank_at: its place in the order; None: it gets one when it becomes due, or now if it belongs to no queue.
        available_at: when it becomes due; None: it is.
        trace_context: the traceparent that its message carries.

    """

    event_id: str
    event_type: str
    aggregate_type: str
    aggregate_id: str
    dedupe_key: str
    payload_json: str
    queue: str = ""
    rank_at: datetime | None = None
    available_at: datetime | None = None
    trace_context: str | None = None


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
    trace_context: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """What a claim takes in order: the events of one type in one queue."""

    queue: str
    event_type: str


async def append(tx: Transaction, new: Sequence[NewEvent]) -> None:
    """Insert events. A conflict of the dedupe key aborts the transaction (ruling 20)."""
    for waits in (False, True):
        rows: list[dict[str, Any]] = [
            {field.name: getattr(event, field.name) for field in fields(NewEvent)}
            | {"status": EventStatus.SCHEDULED if waits else EventStatus.PENDING, "attempt_count": 0}
            for event in new
            if (event.available_at is not None) == waits
        ]
        if rows:
            rank: Any = bindparam("rank_at", type_=events.rank_at.type)
            rank_at = rank if waits else func.coalesce(rank, now(), type_=events.rank_at.type)
            await tx.execute(insert(outbox_events).values(rank_at=rank_at, created_at=now()), rows)


async def claimed(tx: Transaction, claim_token: str) -> list[EventRow]:
    """Read the events that a claim token holds, in the order of their ranks."""
    statement = select(events.rank_at, events.id, *(events[field.name] for field in fields(EventRow))).where(
        events.claim_token == claim_token, events.status == EventStatus.PROCESSING
    )
    found = sorted((await tx.execute(statement)).all(), key=lambda row: (row[0], int(row[1])))
    return [EventRow(**dict(zip((field.name for field in fields(EventRow)), row[2:], strict=True))) for row in found]


async def renew(tx: Transaction, claim_token: str, span: timedelta) -> list[EventRow]:
    """Let a claim begin anew, and read the events that it holds."""
    renewed = await tx.execute(
        update(outbox_events)
        .where(events.claim_token == claim_token, events.status == EventStatus.PROCESSING)
        .values(claim_until=now_plus(span))
    )
    return await claimed(tx, claim_token) if renewed.rowcount else []


async def waiting(tx: Transaction, lanes: Mapping[Lane, int], *, claim_token: str = "") -> dict[Lane, list[int]]:
    """Read the first pending events of lanes, at most the given number of each; lanes without any are missing.

    Args:
        tx: the transaction. No row is locked.
        lanes: which, and how many of each.
        claim_token: leave out events that were settled under this token: the claim is a late copy then, and its answer
            goes to nobody.

    """
    if not lanes:
        return {}
    numbered = list(lanes)
    first = [
        select(literal(number).label("lane"), events.id, events.rank_at)
        .where(
            events.status == EventStatus.PENDING,
            events.queue == lane.queue,
            events.event_type == lane.event_type,
            or_(events.claim_token.is_(None), events.claim_token != claim_token),
        )
        .order_by(events.rank_at, events.id)
        .limit(lanes[lane])
        .subquery()
        for number, lane in enumerate(numbered)
    ]
    found: dict[Lane, list[int]] = {}
    rows = (await tx.execute(union_all(*(select(one) for one in first)))).all()
    for number, event_id, _ in sorted(rows, key=lambda row: (row[0], row[2], row[1])):
        found.setdefault(numbered[number], []).append(event_id)
    return found


async def claim(
    tx: Transaction, ids: Sequence[int], *, claim_token: str, dispatcher_id: str, span: timedelta
) -> list[EventRow]:
    """Claim those of these events that are still pending and that no other claim holds just now."""
    if not tx.sqlite:
        free = select(events.id).where(events.id.in_(sorted(ids)), events.status == EventStatus.PENDING)
        ids = (await tx.execute(free.with_for_update(skip_locked=True))).scalars().all()
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


async def on_their_way(tx: Transaction, queues: Sequence[str], *, since: timedelta) -> dict[str, int]:
    """Count, by queue, the events that are claimed and those that were published in the last `since`."""
    claimed_now = select(events.queue, events.id).where(
        events.status == EventStatus.PROCESSING, events.queue.in_(queues)
    )
    sent = select(events.queue, events.id).where(
        events.settled_at.between(now_plus(-since), now()),
        events.status == EventStatus.PUBLISHED,
        events.queue.in_(queues),
    )
    both = union_all(claimed_now, sent).subquery()
    counts = await tx.execute(select(both.c.queue, func.count()).group_by(both.c.queue))
    return {queue: int(count) for queue, count in counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimState:
    """What a settle needs to know of an event."""

    status: EventStatus
    claim_token: str | None
    attempt_count: int


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
    """What to write about a claimed event. `delay`: how long a scheduled one waits."""

    event_id: str
    status: EventStatus
    attempt_count: int
    last_error: str | None
    delay: timedelta = timedelta(0)


async def settle(tx: Transaction, claim_token: str, settlements: Sequence[Settlement]) -> None:
    """Settle events that the claim token holds. They keep the token, so that a repeated settle is recognised."""
    statement = update(outbox_events).where(
        events.event_id == bindparam("g_event_id"),
        events.claim_token == claim_token,
        events.status == EventStatus.PROCESSING,
    )
    for status, delay in sorted({(settlement.status, settlement.delay) for settlement in settlements}):
        await tx.execute(
            statement.values(
                status=status,
                attempt_count=bindparam("v_attempt_count"),
                last_error=bindparam("v_last_error"),
                claim_until=None,
                settled_at=now() if status in SETTLED else None,
                available_at=now_plus(delay) if status == EventStatus.SCHEDULED else None,
            ),
            [
                {
                    "g_event_id": settlement.event_id,
                    "v_attempt_count": settlement.attempt_count,
                    "v_last_error": settlement.last_error,
                }
                for settlement in settlements
                if (settlement.status, settlement.delay) == (status, delay)
            ],
        )


async def release_expired(tx: Transaction, *, limit: int) -> int:
    """Give back events whose claim has ended, and return how many. Costs them no attempt (OB-3)."""
    ended = select(events.id).where(events.status == EventStatus.PROCESSING, events.claim_until < now())
    return await _release(tx, ended.order_by(events.claim_until).limit(limit))


async def release_held(tx: Transaction, dispatcher_ids: Sequence[str], *, limit: int) -> int:
    """Give back events that these dispatchers have claimed, and return how many (OB-3)."""
    held = select(events.id).where(events.status == EventStatus.PROCESSING, events.locked_by.in_(dispatcher_ids))
    return await _release(tx, held.limit(limit))


async def _release(tx: Transaction, which: Select[tuple[int]]) -> int:
    if not tx.sqlite:
        which = which.with_for_update(skip_locked=True)
    ids = (await tx.execute(which)).scalars().all()
    if ids:
        await tx.execute(
            update(outbox_events)
            .where(events.id.in_(ids), events.status == EventStatus.PROCESSING)
            .values(status=EventStatus.PENDING, claim_token=None, locked_by=None, claim_until=None)
        )
    return len(ids)


async def parked(tx: Transaction, sendable: Sequence[str], queues: Sequence[str]) -> dict[str, int]:
    """Count pending events of other types than these, by type. Queue by queue, so that nothing is sorted."""
    counts: Counter[str] = Counter()
    for queue in queues:
        statement = (
            select(events.event_type, func.count())
            .where(events.status == EventStatus.PENDING, events.queue == queue, events.event_type.not_in(sendable))
            .group_by(events.event_type)
        )
        counts.update({event_type: int(count) for event_type, count in await tx.execute(statement)})
    return dict(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Where an enqueue event is, and since when if nothing more happens to it."""

    event_id: str
    status: EventStatus
    settled_at: datetime | None


async def dispatches(tx: Transaction, dedupe_keys: Sequence[str]) -> dict[str, Dispatch]:
    """Read where events are, by their dedupe keys; those that are gone are missing in the answer."""
    columns = (events.dedupe_key, events.event_id, events.status, events.settled_at)
    return {
        key: Dispatch(event_id=event_id, status=EventStatus(status), settled_at=settled_at)
        for key, event_id, status, settled_at in await tx.execute(
            select(*columns).where(events.dedupe_key.in_(dedupe_keys))
        )
    }
