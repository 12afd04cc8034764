"""Statements on `users`: one row per end user, locked first by whatever counts or orders that user's jobs."""

from collections.abc import Iterable

from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import users
from services.jobs.store.time import now


async def lock(tx: Transaction, user_ids: Iterable[str]) -> None:
    """Create the users that are new and lock all of them until the transaction ends.

    In one statement, because INSERT IGNORE and then SELECT … FOR UPDATE takes a shared lock first, and two of those
    deadlock each other. ON DUPLICATE KEY UPDATE takes the exclusive lock at once.
    """
    user_ids = set(user_ids)
    if not user_ids:
        return
    rows = [{"user_id": user_id, "created_at": now()} for user_id in sorted(user_ids)]
    if tx.sqlite:
        await tx.execute(sqlite_insert(users).values(rows).on_conflict_do_nothing())
    else:
        await tx.execute(mysql_insert(users).values(rows).on_duplicate_key_update(user_id=users.c.user_id))
