"""Statements that look for what is not as it must be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from sqlalchemy import and_, or_, select

from aijobs.states import JobState
from services.jobs.store.database import Transaction
from services.jobs.store.outbox import EventStatus
from services.jobs.store.tables import jobs, outbox_events
from services.jobs.store.time import now_plus


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """How a job ended."""

    job_id: str
    queue: str
    dispatch_no: int
    finished_at: datetime


async def ended(
    tx: Transaction, *, job_type: str, state: JobState, within: timedelta, after: EndedJob | None, limit: int
) -> list[EndedJob]:
    """Read jobs of a type that ended in a state within a span, in the order of their ends, behind `after`."""
    statement = select(*(jobs.c[field.name] for field in fields(EndedJob))).where(
        jobs.c.job_type == job_type, jobs.c.lifecycle_status == state
    )
    if after is None:
        statement = statement.where(jobs.c.finished_at > now_plus(-within))
    else:
        statement = statement.where(
            jobs.c.finished_at >= after.finished_at,
            or_(
                jobs.c.finished_at > after.finished_at,
                and_(jobs.c.finished_at == after.finished_at, jobs.c.job_id > after.job_id),
            ),
        )
    rows = (await tx.execute(statement.order_by(jobs.c.finished_at, jobs.c.job_id).limit(limit))).mappings()
    return [EndedJob(**row) for row in rows]


async def present_keys(tx: Transaction, dedupe_keys: Sequence[str]) -> frozenset[str]:
    """Return those of these dedupe keys that an event has."""
    statement = select(outbox_events.c.dedupe_key).where(outbox_events.c.dedupe_key.in_(dedupe_keys))
    return frozenset((await tx.execute(statement)).scalars())


async def with_pending(tx: Transaction, queues: Iterable[str]) -> frozenset[str]:
    """Return those of these queues that have pending events; the empty one stands for events of no queue."""
    found = set()
    for queue in queues:
        first = select(outbox_events.c.id).where(
            outbox_events.c.status == EventStatus.PENDING, outbox_events.c.queue == queue
        )
        if (await tx.execute(first.limit(1))).first() is not None:
            found.add(queue)
    return frozenset(found)
