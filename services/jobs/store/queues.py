"""Statements on `queues`: which ones are paused (QU-2), and how many messages the broker holds (QU-3, LC-13)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import case, or_, select, update
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import queues
from services.jobs.store.time import now, now_plus


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A queue, and the last two reports of how many of its messages nobody has taken yet."""

    queue: str
    paused_at: datetime | None = None
    paused_by: str = ""
    reason: str = ""
    ready: int | None = None
    ready_at: datetime | None = None
    ready_before: int | None = None
    ready_before_at: datetime | None = None
    #: The database's time at which it was read; None: it has no row.
    read_at: datetime | None = None


#: A later report of a depth counts as another one only after this time.
REPORT_INTERVAL = timedelta(seconds=1)


async def every(tx: Transaction) -> dict[str, QueueRow]:
    """Read all rows, by queue."""
    result = await tx.execute(select(queues, now().label("read_at")).order_by(queues.c.queue))
    return {row["queue"]: QueueRow(**row) for row in result.mappings()}


async def paused(tx: Transaction) -> frozenset[str]:
    """Read which queues are paused."""
    return frozenset((await tx.execute(select(queues.c.queue).where(queues.c.paused_at.is_not(None)))).scalars())


async def lock(tx: Transaction, names: Iterable[str]) -> dict[str, QueueRow]:
    """Hold queues alone until the transaction ends, and read them; those without a row get one."""
    await create(tx, names)
    result = await tx.execute(select(queues, now().label("read_at")).where(queues.c.queue.in_(sorted(names))))
    return {row["queue"]: QueueRow(**row) for row in result.mappings()}


async def report(tx: Transaction, depths: Mapping[str, int]) -> None:
    """Store how many messages queues hold that nobody has taken; a report that comes too soon after one is dropped."""
    for queue, ready in sorted(depths.items()):
        fresh = or_(queues.c.ready_at.is_(None), queues.c.ready_at < now_plus(-REPORT_INTERVAL))
        first = {"queue": queue, "paused_at": None, "paused_by": "", "reason": "", "ready": ready, "ready_at": now()}
        # MySQL evaluates from left to right: what is written must not be read afterwards.
        later = [
            ("ready_before", case((fresh, queues.c.ready), else_=queues.c.ready_before)),
            ("ready_before_at", case((fresh, queues.c.ready_at), else_=queues.c.ready_before_at)),
            ("ready", case((fresh, ready), else_=queues.c.ready)),
            ("ready_at", case((fresh, now()), else_=queues.c.ready_at)),
        ]
        if tx.sqlite:
            insert = sqlite_insert(queues).values(first)
            await tx.execute(insert.on_conflict_do_update(index_elements=["queue"], set_=dict(later)))
        else:
            await tx.execute(mysql_insert(queues).values(first).on_duplicate_key_update(later))


async def create(tx: Transaction, names: Iterable[str]) -> None:
    """Create the rows of queues that have none, and hold these rows until the transaction ends."""
    rows = [{"queue": name, "paused_at": None, "paused_by": "", "reason": ""} for name in sorted(set(names))]
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
