"""Statements on `virtual_times`, and the ranks of jobs: who comes next in a queue (QU-3, ruling 23)."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import and_, bindparam, delete, literal, or_, select, update
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import jobs, virtual_times
from services.jobs.store.time import now, now_plus

times = virtual_times.c


class Line(NamedTuple):
    """The jobs among which places are given one after the other."""

    user_id: str
    queue: str
    priority: int


async def read(tx: Transaction, lines: Iterable[Line]) -> tuple[datetime, dict[Line, datetime]]:
    """Read the database's time, and where the next job of each line is placed; new lines are missing.

    The users' rows must be locked by the transaction.
    """
    theirs = or_(
        *(
            and_(times.user_id == line.user_id, times.queue == line.queue, times.priority == line.priority)
            for line in sorted(set(lines))
        )
    )
    one_row = select(literal(1).label("one")).subquery()
    statement = select(now(), times.user_id, times.queue, times.priority, times.virtual_at).select_from(
        one_row.outerjoin(virtual_times, theirs)
    )
    rows = (await tx.execute(statement)).all()
    return rows[0][0], {
        Line(user_id, queue, priority): at for _, user_id, queue, priority, at in rows if user_id is not None
    }


async def store(tx: Transaction, places: Mapping[Line, datetime]) -> None:
    """Store where the next job of each line is placed."""
    if not places:
        return
    rows = [line._asdict() | {"virtual_at": at} for line, at in sorted(places.items())]
    if tx.sqlite:
        insert = sqlite_insert(virtual_times).values(rows)
        key = ["user_id", "queue", "priority"]
        await tx.execute(
            insert.on_conflict_do_update(index_elements=key, set_={"virtual_at": insert.excluded.virtual_at})
        )
    else:
        mysql = mysql_insert(virtual_times).values(rows)
        await tx.execute(mysql.on_duplicate_key_update(virtual_at=mysql.inserted.virtual_at))


async def give(tx: Transaction, ranks: Mapping[str, datetime]) -> None:
    """Store the ranks of jobs that became due. A rank once given stays."""
    if ranks:
        statement = (
            update(jobs)
            .where(jobs.c.job_id == bindparam("g_job_id"), jobs.c.rank_at.is_(None))
            .values(rank_at=bindparam("v_rank_at"))
        )
        await tx.execute(statement, [{"g_job_id": job_id, "v_rank_at": ranks[job_id]} for job_id in sorted(ranks)])


async def forget(tx: Transaction, *, older: timedelta, limit: int) -> int:
    """Delete virtual times that lie further back than `older`, and return how many."""
    statement = (
        select(times.user_id, times.queue, times.priority).where(times.virtual_at < now_plus(-older)).limit(limit)
    )
    # In the order of the key, as creates write them.
    found = sorted(tuple(row) for row in await tx.execute(statement))
    for user_id, queue, priority in found:
        line = and_(times.user_id == user_id, times.queue == queue, times.priority == priority)
        # Looked at again: the user may have created a job in between.
        await tx.execute(delete(virtual_times).where(line, times.virtual_at < now_plus(-older)))
    return len(found)
