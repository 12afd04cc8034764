"""Statements on `dispatchers`: when each dispatcher process was last seen (OB-3)."""

import json
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import dispatchers
from services.jobs.store.time import now, now_plus


async def sign(tx: Transaction, dispatcher_id: str, event_types: Sequence[str]) -> None:
    """Store that a dispatcher was seen now, and what it can send. Holds its row until the transaction ends."""
    said = {"seen_at": now(), "event_types_json": json.dumps(sorted(event_types))}
    row = {"dispatcher_id": dispatcher_id, "first_seen_at": now(), **said}
    if tx.sqlite:
        await tx.execute(
            sqlite_insert(dispatchers).values(row).on_conflict_do_update(index_elements=["dispatcher_id"], set_=said)
        )
    else:
        await tx.execute(mysql_insert(dispatchers).values(row).on_duplicate_key_update(**said))


async def sendable(tx: Transaction, within: timedelta) -> frozenset[str]:
    """Read which event types some dispatcher could send that was seen within this time."""
    statement = select(dispatchers.c.event_types_json).where(dispatchers.c.seen_at >= now_plus(-within))
    return frozenset(event_type for text in (await tx.execute(statement)).scalars() for event_type in json.loads(text))


async def lock_unseen(tx: Transaction, unseen: timedelta) -> Sequence[str]:
    """Hold the dispatchers that were not seen for so long, except those that are being seen just now."""
    statement = select(dispatchers.c.dispatcher_id).where(dispatchers.c.seen_at < now_plus(-unseen))
    if not tx.sqlite:
        statement = statement.with_for_update(skip_locked=True)
    return (await tx.execute(statement)).scalars().all()


async def any_seen(tx: Transaction, *, within: timedelta) -> bool:
    """Tell whether any dispatcher was seen within a span."""
    statement = select(dispatchers.c.dispatcher_id).where(dispatchers.c.seen_at > now_plus(-within)).limit(1)
    return (await tx.execute(statement)).first() is not None


async def forget(tx: Transaction, *, unseen: timedelta, limit: int) -> None:
    """Delete dispatchers that were not seen for so long."""
    statement = select(dispatchers.c.dispatcher_id).where(dispatchers.c.seen_at < now_plus(-unseen)).limit(limit)
    ids = (await tx.execute(statement)).scalars().all()
    if ids:
        await tx.execute(delete(dispatchers).where(dispatchers.c.dispatcher_id.in_(ids)))
