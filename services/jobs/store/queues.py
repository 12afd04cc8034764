"""Statements on `queues`: which queues are paused (QU-2)."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import queues
from services.jobs.store.time import now


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A queue that was paused at least once."""

    queue: str
    paused_at: datetime | None
    paused_by: str
    reason: str


async def every(tx: Transaction) -> dict[str, QueueRow]:
    """Read all rows, by queue."""
    result = await tx.execute(select(queues).order_by(queues.c.queue))
    return {row["queue"]: QueueRow(**row) for row in result.mappings()}


async def paused(tx: Transaction) -> frozenset[str]:
    """Read which queues are paused."""
    return frozenset((await tx.execute(select(queues.c.queue).where(queues.c.paused_at.is_not(None)))).scalars())


async def create(tx: Transaction, names: Iterable[str]) -> None:
    """Create the rows of queues that have none, and hold these rows until the transaction ends."""
    rows = [{"queue": name, "paused_at": None, "paused_by": "", "reason": ""} for name in sorted(names)]
    if tx.sqlite:
        await tx.execute(sqlite_insert(queues).values(rows).on_conflict_do_nothing())
    else:
        await tx.execute(mysql_insert(queues).values(rows).on_duplicate_key_update(queue=queues.c.queue))


async def pause(tx: Transaction, queue: str, *, by: str, reason: str) -> None:
    """Pause a queue that has a row; one that is paused stays as it is."""
    await tx.execute(
        update(queues)
        .where(queues.c.queue == queue, queues.c.paused_at.is_(None))
        .values(paused_at=now(), paused_by=by, reason=reason)
    )


async def resume(tx: Transaction, queue: str) -> None:
    """End the pause of a queue."""
    await tx.execute(update(queues).where(queues.c.queue == queue).values(paused_at=None, paused_by="", reason=""))
