"""Statements that read `job_history`; entries are appended by `changes.py` alone."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import RowMapping, select, tuple_

from services.jobs.store.changes import Kind
from services.jobs.store.database import Transaction
from services.jobs.store.tables import job_history


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One entry of a job's history."""

    job_id: str
    sequence: int
    kind: Kind
    from_state: str | None
    to_state: str
    attempt: int
    actor: str
    reason: str
    lease_token: str | None
    execution: int | None
    feedback: str | None
    at: datetime


COLUMNS = [job_history.c[field.name] for field in fields(HistoryRow)]


async def after(tx: Transaction, job_id: str, sequence: int, limit: int = 100) -> list[HistoryRow]:
    """Read a job's entries with numbers above `sequence`, in order."""
    statement = (
        select(*COLUMNS)
        .where(job_history.c.job_id == job_id, job_history.c.sequence > sequence)
        .order_by(job_history.c.sequence)
        .limit(limit)
    )
    return _rows((await tx.execute(statement)).mappings().all())


async def of_leases(tx: Transaction, leases: Sequence[tuple[str, int]]) -> list[HistoryRow]:
    """Read every entry of (job id, attempt) pairs: what a repeated report is answered from."""
    statement = (
        select(*COLUMNS)
        .where(tuple_(job_history.c.job_id, job_history.c.attempt).in_(sorted(set(leases))))
        .order_by(job_history.c.job_id, job_history.c.sequence)
    )
    return _rows((await tx.execute(statement)).mappings().all())


async def failed_executions(tx: Transaction, job_ids: Sequence[str]) -> dict[str, list[HistoryRow]]:
    """Read the failed executions of jobs over all attempts, oldest first."""
    statement = (
        select(*COLUMNS)
        .where(job_history.c.job_id.in_(job_ids), job_history.c.kind == Kind.EXECUTION_FAILED)
        .order_by(job_history.c.job_id, job_history.c.sequence)
    )
    found: dict[str, list[HistoryRow]] = {}
    for row in _rows((await tx.execute(statement)).mappings().all()):
        found.setdefault(row.job_id, []).append(row)
    return found


async def tokens(tx: Transaction, job_ids: Sequence[str]) -> dict[str, dict[str, Kind]]:
    """Read what locks of jobs led to, by their tokens: a lease, the present one too, or another dispatch."""
    if not job_ids:
        return {}
    statement = select(job_history.c.job_id, job_history.c.lease_token, job_history.c.kind).where(
        job_history.c.job_id.in_(job_ids),
        job_history.c.kind.in_((Kind.LOCKED, Kind.TAKEN_OVER, Kind.DISPATCHED_AGAIN)),
        job_history.c.lease_token.is_not(None),
    )
    found: dict[str, dict[str, Kind]] = {}
    for job_id, token, kind in await tx.execute(statement):
        found.setdefault(job_id, {})[token] = Kind(kind)
    return found


def _rows(mappings: Sequence[RowMapping]) -> list[HistoryRow]:
    return [HistoryRow(**{**mapping, "kind": Kind(mapping["kind"])}) for mapping in mappings]
