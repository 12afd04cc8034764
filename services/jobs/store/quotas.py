"""Statements behind limits per user: counting live jobs, and `user_quota_counters` (CR-5)."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from aijobs.states import JobState
from services.jobs.store.database import Transaction
from services.jobs.store.tables import jobs, user_quota_counters
from services.jobs.store.time import now

LIVE = (JobState.QUEUED, JobState.RUNNING)


class Counter(NamedTuple):
    """What is counted: jobs of a user, of one type or (empty) of all, created in a period."""

    user_id: str
    job_type: str
    period: str


async def live_jobs(tx: Transaction, user_ids: Sequence[str], *, by_type: bool) -> dict[tuple[str, str], int]:
    """Count the jobs of users that have not ended, by (user id, job type); under "" those of all types."""
    columns = [jobs.c.user_id, jobs.c.job_type] if by_type else [jobs.c.user_id]
    statement = (
        select(*columns, func.count())
        .where(jobs.c.user_id.in_(user_ids), jobs.c.lifecycle_status.in_(LIVE))
        .group_by(*columns)
    )
    counts: dict[tuple[str, str], int] = {}
    for user_id, *job_type, number in await tx.execute(statement):
        if job_type:
            counts[user_id, job_type[0]] = number
        counts[user_id, ""] = counts.get((user_id, ""), 0) + number
    return counts


async def today(tx: Transaction) -> datetime:
    """Read the database's time."""
    moment: datetime = (await tx.execute(select(now()))).scalar_one()
    return moment


async def created_jobs(tx: Transaction, user_ids: Sequence[str], periods: Sequence[str]) -> dict[Counter, int]:
    """Read the counters of users for these periods."""
    table = user_quota_counters.c
    statement = select(table.user_id, table.job_type, table.period, table.created).where(
        table.user_id.in_(user_ids), table.period.in_(periods)
    )
    return {Counter(user_id, kind, period): number for user_id, kind, period, number in await tx.execute(statement)}


async def store(tx: Transaction, counters: Mapping[Counter, int]) -> None:
    """Store counters. The transaction holds the rows of their users."""
    if not counters:
        return
    rows = [{**counter._asdict(), "created": number} for counter, number in sorted(counters.items())]
    if tx.sqlite:
        statement = sqlite_insert(user_quota_counters).values(rows)
        await tx.execute(
            statement.on_conflict_do_update(
                index_elements=list(Counter._fields), set_={"created": statement.excluded.created}
            )
        )
    else:
        insert = mysql_insert(user_quota_counters).values(rows)
        await tx.execute(insert.on_duplicate_key_update(created=insert.inserted.created))
