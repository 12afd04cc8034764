"""Statements on `jobs` other than those that write its state (see `changes.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from sqlalchemy import Select, and_, bindparam, or_, select, update

from aijobs.states import JobState
from services.jobs.store.database import Transaction
from services.jobs.store.tables import jobs
from services.jobs.store.time import now, now_plus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A row of `jobs` without its large texts, and the database's time at which it was read."""

    job_id: str
    job_type: str
    user_id: str
    target_type: str
    target_id: str
    lifecycle_status: JobState
    queue: str
    priority: int
    progress: int
    labels_json: str
    idempotency_key: str | None
    request_fingerprint: str
    definition_version: str
    cancellable: bool
    max_retries: int
    backoff_ms: int
    abort_strategy: str
    run_timeout_ms: int | None
    retry_count: int
    attempt: int
    dispatch_no: int
    sequence: int
    lease_token: str | None
    locked_by: str | None
    lock_until: datetime | None
    lapsed_at: datetime | None
    takeover_count: int
    cancel_requested_at: datetime | None
    run_at: datetime | None
    due_at: datetime | None
    rank_at: datetime | None
    retry_of: str | None
    root_job_id: str | None
    parent_job_id: str | None
    depth: int
    trace_context: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error_code: str | None
    error_public: str | None
    artifact_count: int
    output_hash: str | None
    read_at: datetime

    @property
    def leased(self) -> bool:
        """True if somebody holds a lease of the job."""
        return self.lifecycle_status == JobState.RUNNING and self.lapsed_at is None

    @property
    def waits(self) -> bool:
        """True if the job waits for a lock: queued, or running with a lapsed lease."""
        return self.lifecycle_status == JobState.QUEUED or self.lapsed_at is not None

    @property
    def due(self) -> bool:
        """True if the job may start now."""
        return self.due_at is None or self.due_at <= self.read_at

    @property
    def run_remaining(self) -> timedelta | None:
        """How long the run may still take, all of its executions and waits together; None: as long as it likes."""
        if self.run_timeout_ms is None:
            return None
        started_at = self.read_at if self.started_at is None else self.started_at
        return started_at + timedelta(milliseconds=self.run_timeout_ms) - self.read_at


def _select() -> Select[tuple[object, ...]]:
    columns = (jobs.c[field.name] for field in fields(JobRow) if field.name != "read_at")
    return select(*columns, now().label("read_at"))


async def _rows(tx: Transaction, statement: Select[tuple[object, ...]]) -> list[JobRow]:
    result = await tx.execute(statement)
    return [
        JobRow(**{**row, "lifecycle_status": JobState(row["lifecycle_status"])}) for row in map(dict, result.mappings())
    ]


async def get(tx: Transaction, job_ids: Iterable[str], *, lock: bool = False) -> dict[str, JobRow]:
    """Read jobs by id; unknown ones are missing in the answer. With `lock`, hold the rows until the transaction ends.

    Locked in the order of the ids, so that two transactions never wait for each other.
    """
    statement = _select().where(jobs.c.job_id.in_(sorted(set(job_ids)))).order_by(jobs.c.job_id)
    if lock:
        statement = statement.with_for_update()
    return {row.job_id: row for row in await _rows(tx, statement)}


async def find_by_key(tx: Transaction, keys: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], JobRow]:
    """Find jobs by (user id, job type, idempotency key)."""
    found: dict[tuple[str, str, str], JobRow] = {}
    for user_id, job_type, key in sorted(set(keys)):
        statement = _select().where(
            jobs.c.user_id == user_id, jobs.c.job_type == job_type, jobs.c.idempotency_key == key
        )
        for row in await _rows(tx, statement):
            found[user_id, job_type, key] = row
    return found


async def page(
    tx: Transaction,
    *,
    user_id: str = "",
    job_type: str = "",
    queue: str = "",
    states: Sequence[JobState] = (),
    before: str = "",
    limit: int,
) -> list[JobRow]:
    """Read the newest jobs that fit all given filters, with ids below `before`. Ids rise with time (UUIDv7).

    Each state is asked for by itself: so the order of the answer is that of an index, and nothing is sorted.
    """
    statement = _select().order_by(jobs.c.job_id.desc()).limit(limit)
    for column, value in ((jobs.c.user_id, user_id), (jobs.c.job_type, job_type), (jobs.c.queue, queue)):
        if value:
            statement = statement.where(column == value)
    if before:
        statement = statement.where(jobs.c.job_id < before)
    if not states:
        return await _rows(tx, statement)
    rows: list[JobRow] = []
    for state in states:
        rows += await _rows(tx, statement.where(jobs.c.lifecycle_status == state))
    return sorted(rows, key=lambda row: row.job_id, reverse=True)[:limit]


async def outputs(tx: Transaction, job_ids: Sequence[str]) -> dict[str, str]:
    """Read the stored output texts of succeeded jobs."""
    statement = select(jobs.c.job_id, jobs.c.output_json).where(
        jobs.c.job_id.in_(job_ids), jobs.c.output_json.is_not(None)
    )
    return {job_id: text for job_id, text in await tx.execute(statement) if text is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """How far a watched job is: enough to see that something changed."""

    sequence: int
    progress: int


async def signs(tx: Transaction, job_ids: Iterable[str]) -> Mapping[str, Sign]:
    """Read how far jobs are; one query by primary key however many are watched."""
    statement = select(jobs.c.job_id, jobs.c.sequence, jobs.c.progress).where(jobs.c.job_id.in_(list(job_ids)))
    return {
        job_id: Sign(sequence=sequence, progress=progress) for job_id, sequence, progress in await tx.execute(statement)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A lease to extend, and the progress to store with it (None: unchanged)."""

    job_id: str
    attempt: int
    lease_token: str
    progress: int | None


async def extend(tx: Transaction, renewals: Sequence[Renewal], span: timedelta) -> int:
    """Extend leases that still hold to `now + span` and return how many did. The fence is in the WHERE clause."""
    extended = 0
    for with_progress in (False, True):
        group = [renewal for renewal in renewals if (renewal.progress is not None) == with_progress]
        if not group:
            continue
        statement = (
            update(jobs)
            .where(
                jobs.c.job_id == bindparam("g_job_id"),
                jobs.c.attempt == bindparam("g_attempt"),
                jobs.c.lease_token == bindparam("g_lease_token"),
                jobs.c.lifecycle_status == JobState.RUNNING,
            )
            .values(lock_until=now_plus(span), **({"progress": bindparam("v_progress")} if with_progress else {}))
        )
        result = await tx.execute(
            statement,
            [
                {
                    "g_job_id": renewal.job_id,
                    "g_attempt": renewal.attempt,
                    "g_lease_token": renewal.lease_token,
                    **({"v_progress": renewal.progress} if with_progress else {}),
                }
                for renewal in group
            ],
        )
        extended += result.rowcount
    return extended


async def expired_leases(
    tx: Transaction, *, grace: timedelta | None, limit: int, passed_over: int = 0
) -> Sequence[str]:
    """Read the jobs whose lease ended longer than `grace` ago, the oldest first; None: whose lease is held at all."""
    ended = jobs.c.lock_until.is_not(None) if grace is None else jobs.c.lock_until < now_plus(-grace)
    statement = select(jobs.c.job_id).where(ended).order_by(jobs.c.lock_until).limit(limit).offset(passed_over)
    return (await tx.execute(statement)).scalars().all()


async def retries(tx: Transaction, job_id: str) -> list[JobRow]:
    """Read the jobs that retry a job, oldest first."""
    return await _rows(tx, _select().where(jobs.c.retry_of == job_id).order_by(jobs.c.job_id))


async def follow_ups(tx: Transaction, job_id: str) -> list[str]:
    """Read the ids of the jobs that the result of a job called for, oldest first."""
    statement = select(jobs.c.job_id).where(jobs.c.parent_job_id == job_id).order_by(jobs.c.job_id)
    return [found for (found,) in await tx.execute(statement)]


async def queued(
    tx: Transaction, *, queue: str, after: JobRow | None, limit: int, since: timedelta | None
) -> list[JobRow]:
    """Read queued jobs that are due and were created longer than `since` ago, in order, behind `after`.

    Args:
        tx: the transaction.
        queue: only of this queue; empty: of all.
        after: the last job of the page before.
        limit: at most.
        since: how long they have waited, as far as their row tells; None: however long, and also if they are not due.

    """
    statement = _waiting(queue, since).where(jobs.c.lifecycle_status == JobState.QUEUED)
    if since is not None:
        statement = statement.where(jobs.c.created_at <= now_plus(-since))
    if after is not None:
        statement = statement.where(jobs.c.job_id > after.job_id)
    return await _rows(tx, statement.order_by(jobs.c.job_id).limit(limit))


async def lapsed(
    tx: Transaction, *, queue: str, after: JobRow | None, limit: int, since: timedelta | None
) -> list[JobRow]:
    """Read running jobs whose lease lapsed longer than `since` ago and that are due; arguments as those of `queued`."""
    statement = _waiting(queue, since).where(
        jobs.c.lapsed_at.is_not(None) if since is None else jobs.c.lapsed_at <= now_plus(-since)
    )
    if after is not None:
        statement = statement.where(
            or_(
                jobs.c.lapsed_at > after.lapsed_at,
                and_(jobs.c.lapsed_at == after.lapsed_at, jobs.c.job_id > after.job_id),
            )
        )
    return await _rows(tx, statement.order_by(jobs.c.lapsed_at, jobs.c.job_id).limit(limit))


def _waiting(queue: str, since: timedelta | None) -> Select[tuple[object, ...]]:
    statement = _select()
    if since is not None:
        statement = statement.where(or_(jobs.c.due_at.is_(None), jobs.c.due_at <= now_plus(-since)))
    return statement.where(jobs.c.queue == queue) if queue else statement
