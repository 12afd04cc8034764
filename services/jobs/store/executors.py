"""Statements on `executors`: which executor processes there are and when they were last seen (LC-8).

A row is locked before the jobs that its executor holds. Locking jobs takes it shared, so that an executor's calls do
not wait for each other; ending its session takes it alone, and so sees every lease that was handed out before.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, and_, delete, func, or_, select, update
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import executors, jobs
from services.jobs.store.time import now, now_plus

#: A sign of life is stored at most this often, unless the executor is under suspicion.
SIGN_INTERVAL = timedelta(seconds=1)
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """How busy an executor is with one queue, as it said. `idle`: for how long there has been a free slot."""

    queue: str
    slots: int
    free_slots: int
    idle: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How an executor introduces itself. `hello_no` counts the hellos of its process, from 1."""

    executor_id: str
    hello_no: int
    version: str
    job_types: Sequence[str]
    queues: Sequence[QueueLoad]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRow:
    """A row of `executors`, and the database's time at which it was read."""

    executor_id: str
    session_epoch: int
    version: str
    job_types_json: str
    queues_json: str
    first_seen_at: datetime
    seen_at: datetime
    reported_at: datetime
    disconnected_at: datetime | None
    lost_at: datetime | None
    drain_requested_at: datetime | None
    read_at: datetime

    @property
    def job_types(self) -> Sequence[str]:
        """The job types that it can run."""
        types: list[str] = json.loads(self.job_types_json)
        return types

    @property
    def queues(self) -> Sequence[QueueLoad]:
        """What it last said about its queues."""
        return [
            QueueLoad(
                queue=load["queue"],
                slots=load["slots"],
                free_slots=load["freeSlots"],
                idle=timedelta(seconds=load["idleSeconds"]),
            )
            for load in json.loads(self.queues_json)
        ]

    @property
    def under_suspicion(self) -> bool:
        """True if its session broke and it has given no sign of life since."""
        return self.disconnected_at is not None and self.seen_at <= self.disconnected_at


def _select() -> Select[tuple[object, ...]]:
    columns = (executors.c[field.name] for field in fields(ExecutorRow) if field.name != "read_at")
    return select(*columns, now().label("read_at"))


async def get(tx: Transaction, executor_id: str, *, lock: bool = False, share: bool = False) -> ExecutorRow | None:
    """Read one executor. With `lock`, hold the row alone until the transaction ends; with `share`, with others."""
    statement = _select().where(executors.c.executor_id == executor_id)
    if lock or share:
        statement = statement.with_for_update(read=share)
    row = (await tx.execute(statement)).mappings().one_or_none()
    return None if row is None else ExecutorRow(**row)


async def say_hello(tx: Transaction, hello: Hello) -> int | None:
    """Store a hello and return the epoch of the session that begins with it; None: a later hello was heard before."""
    said = {
        "hello_no": hello.hello_no,
        "version": hello.version,
        "job_types_json": json.dumps(sorted(hello.job_types)),
        "queues_json": _queues_json(hello.queues),
        "seen_at": now(),
        "reported_at": now(),
        "disconnected_at": None,
        "lost_at": None,
    }
    first = {"executor_id": hello.executor_id, "session_epoch": 0, "first_seen_at": now(), **said, "hello_no": 0}
    # Makes the row if there is none, and holds it alone either way.
    if tx.sqlite:
        await tx.execute(sqlite_insert(executors).values(first).on_conflict_do_nothing())
    else:
        await tx.execute(
            mysql_insert(executors).values(first).on_duplicate_key_update(executor_id=executors.c.executor_id)
        )
    newer = update(executors).where(executors.c.executor_id == hello.executor_id, executors.c.hello_no < hello.hello_no)
    result = await tx.execute(newer.values(session_epoch=executors.c.session_epoch + 1, **said))
    if not result.rowcount:
        return None
    epoch = select(executors.c.session_epoch).where(executors.c.executor_id == hello.executor_id)
    return int((await tx.execute(epoch)).scalar_one())


async def report(tx: Transaction, executor_id: str, epoch: int, queues: Sequence[QueueLoad]) -> None:
    """Store how busy an executor is; a sign of life too. The report of a session that is over changes nothing."""
    await tx.execute(
        update(executors)
        .where(
            executors.c.executor_id == executor_id,
            executors.c.session_epoch == epoch,
            executors.c.disconnected_at.is_(None),
        )
        .values(queues_json=_queues_json(queues), seen_at=now(), reported_at=now())
    )


async def sign(tx: Transaction, executor_id: str) -> None:
    """Store a sign of life, if one is due: at most once a second, unless the executor is under suspicion."""
    due = select(executors.c.executor_id).where(
        executors.c.executor_id == executor_id,
        or_(executors.c.seen_at < now_plus(-SIGN_INTERVAL), executors.c.seen_at <= executors.c.disconnected_at),
    )
    # Looked at first: most calls find that it is not due, and then lock nothing.
    if (await tx.execute(due)).scalar_one_or_none() is not None:
        await tx.execute(update(executors).where(executors.c.executor_id == executor_id).values(seen_at=now()))


async def disconnect(tx: Transaction, executor_id: str, epoch: int) -> bool:
    """Note that a session broke; False if it is no longer the executor's present one."""
    result = await tx.execute(
        update(executors)
        .where(
            executors.c.executor_id == executor_id,
            executors.c.session_epoch == epoch,
            executors.c.lost_at.is_(None),
        )
        .values(disconnected_at=now())
    )
    return bool(result.rowcount)


async def lose(tx: Transaction, executor: ExecutorRow) -> None:
    """Note that an executor counts as gone. The epoch rises, so that a late call of it locks nothing."""
    await tx.execute(
        update(executors)
        .where(executors.c.executor_id == executor.executor_id)
        .values(lost_at=now(), session_epoch=executor.session_epoch + 1)
    )


async def remove(tx: Transaction, executor_id: str) -> None:
    """Delete an executor that said goodbye."""
    await tx.execute(delete(executors).where(executors.c.executor_id == executor_id))


async def remove_all(tx: Transaction) -> None:
    """Delete all executors."""
    await tx.execute(delete(executors))


async def request_drain(tx: Transaction, executor_id: str) -> None:
    """Note that an operator wants the executor to take no more jobs."""
    await tx.execute(
        update(executors)
        .where(executors.c.executor_id == executor_id, executors.c.drain_requested_at.is_(None))
        .values(drain_requested_at=now())
    )


async def held_jobs(tx: Transaction, executor_id: str) -> Sequence[str]:
    """Read the jobs whose lease an executor holds, in the order in which they are locked."""
    statement = select(jobs.c.job_id).where(jobs.c.locked_by == executor_id).order_by(jobs.c.job_id)
    return (await tx.execute(statement)).scalars().all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an executor is to be told: to drain, and, if a run is named, that its cancel was requested."""

    executor_id: str
    drain: bool
    job_id: str | None
    attempt: int | None


async def wishes(tx: Transaction, executor_ids: Iterable[str]) -> Sequence[Wish]:
    """Read what these executors are to be told: one statement for all of them, twice a second on each replica."""
    cancelled = and_(jobs.c.locked_by == executors.c.executor_id, jobs.c.cancel_requested_at.is_not(None))
    statement = (
        select(executors.c.executor_id, executors.c.drain_requested_at, jobs.c.job_id, jobs.c.attempt)
        .select_from(executors.outerjoin(jobs, cancelled))
        .where(
            executors.c.executor_id.in_(list(executor_ids)),
            or_(executors.c.drain_requested_at.is_not(None), jobs.c.job_id.is_not(None)),
        )
    )
    return [
        Wish(executor_id=executor_id, drain=drain_at is not None, job_id=job_id, attempt=attempt)
        for executor_id, drain_at, job_id, attempt in await tx.execute(statement)
    ]


async def latest(tx: Transaction, *, within: timedelta) -> Sequence[ExecutorRow]:
    """Read the executors that were seen within a span, the latest one first; at most 1,000."""
    statement = _select().where(executors.c.seen_at > now_plus(-within)).order_by(executors.c.seen_at.desc())
    return [ExecutorRow(**row) for row in (await tx.execute(statement.limit(MOST_LISTED))).mappings()]


async def running_counts(tx: Transaction, executor_ids: Iterable[str]) -> Mapping[str, int]:
    """Count the leases that executors hold."""
    statement = (
        select(jobs.c.locked_by, func.count())
        .where(jobs.c.locked_by.in_(list(executor_ids)))
        .group_by(jobs.c.locked_by)
    )
    return {row[0]: row[1] for row in await tx.execute(statement)}


async def forget(tx: Transaction, *, unseen: timedelta, limit: int) -> int:
    """Delete executors that were not seen for a span; returns how many."""
    old = select(executors.c.executor_id).where(executors.c.seen_at < now_plus(-unseen)).limit(limit)
    ids = (await tx.execute(old)).scalars().all()
    if ids:
        await tx.execute(
            delete(executors).where(executors.c.executor_id.in_(ids), executors.c.seen_at < now_plus(-unseen))
        )
    return len(ids)


def _queues_json(queues: Sequence[QueueLoad]) -> str:
    said: list[dict[str, Any]] = [
        {
            "queue": load.queue,
            "slots": load.slots,
            "freeSlots": load.free_slots,
            "idleSeconds": load.idle.total_seconds(),
        }
        for load in queues
    ]
    return json.dumps(said)
