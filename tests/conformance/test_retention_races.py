"""Deleting what is old while others delete, create, retry, lock and end (OB-10)."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from sqlalchemy import text

from aijobs.errors import AijobsError, JobNotFound, JobNotRetryable, RetryInProgress
from aijobs.states import JobState
from services.jobs.creation import Created
from services.jobs.execution import Released
from services.jobs.retention import DELETED
from services.jobs.store import jobs as job_store
from services.jobs.store import retention as retention_store
from services.jobs.store import users
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.tables import (
    outbox_events,
)
from tests.acceptance.waiting import until
from tests.conformance.aging import DAY, OF_JOBS, ZERO, age, ended, events, ids, publish, retention, retry
from tests.conformance.conftest import Jobs, lease_of, migrate_by_copy, new_job, success


async def test_loops_on_every_replica_at_once_delete_each_thing_once(jobs: Jobs, monkeypatch) -> None:
    monkeypatch.setattr("services.jobs.retention.JOB_CHUNK", 4)
    monkeypatch.setattr("services.jobs.retention.CHUNK", 5)
    for number in range(12):
        await ended(jobs, user_id=f"user-{number % 5}")
    waiting = {(await jobs.create()).job.job_id for _ in range(6)}
    await publish(jobs)
    await age(jobs, 31 * DAY)
    before = await deleted()
    await asyncio.gather(*(retention(jobs).prune() for _ in range(4)))
    assert await ids(jobs) == waiting
    assert len(await events(jobs)) == 6
    grown = {kind: number - before.get(kind, 0) for kind, number in (await deleted()).items()}
    assert grown == {"job": 12, "snapshot": 12, "artifact": 12, "history": 36, "request": 12, "event": 24}


async def deleted() -> dict[str, float]:
    return {
        sample.labels["kind"]: sample.value
        for metric in DELETED.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_what_is_deleted_while_it_is_asked_for_is_there_whole_or_gone_whole(jobs: Jobs, monkeypatch) -> None:
    """Retries, repeated creates and cancels of jobs that loops are deleting at that moment."""
    monkeypatch.setattr("services.jobs.retention.JOB_CHUNK", 3)
    for number in range(15):
        await ended(
            jobs,
            JobState.FAILED,
            user_id=f"user-{number % 3}",
            request_id=f"r{number}",
            idempotency_key=f"k{number}",
        )
    old = sorted(await ids(jobs))
    await age(jobs, 31 * DAY)
    answers = await asyncio.gather(
        *(retention(jobs, snapshots=60 * DAY).prune() for _ in range(2)),
        *(retry(jobs, job_id) for job_id in reversed(old)),
        *(create_again(jobs, number, request_id) for number in range(15) for request_id in (f"r{number}", "")),
        *(jobs.cancel(job_id) for job_id in old),
        return_exceptions=True,
    )
    unexpected = [a for a in answers if isinstance(a, BaseException) and not isinstance(a, AijobsError)]
    assert unexpected == []
    retries = answers[2:17]
    assert all(isinstance(a, JobRow | JobNotFound | RetryInProgress | JobNotRetryable) for a in retries), retries
    present = await ids(jobs)
    assert present >= {a.retry_of for a in retries if isinstance(a, JobRow)}, "what is being retried stays"
    for table in OF_JOBS:
        column = "aggregate_id" if table is outbox_events else "job_id"
        assert {row[column] for row in await jobs.rows(table)} <= present, table.name
    for answer in answers[17:47]:
        assert isinstance(answer, Created), answer
        assert answer.job.job_id in present or answer.job.job_id in old
    for number in range(15):
        again = await create_again(jobs, number, f"r{number}")
        assert again.job.job_id in await ids(jobs), "a repeat never answers with a job that is gone"


async def create_again(jobs: Jobs, number: int, request_id: str) -> Created:
    return await jobs.create(
        user_id=f"user-{number % 3}", request_id=request_id or uuid4().hex, idempotency_key=f"k{number}"
    )


async def test_no_job_loses_its_event_while_jobs_are_locked_given_back_and_ended(jobs: Jobs) -> None:
    """Every event is old as soon as it is published; jobs begin and cease to wait all the time."""
    await jobs.holder()
    instantly = retention(jobs, published_events=ZERO, dead_events=ZERO)
    busy = asyncio.Event()

    async def prune() -> None:
        while not busy.is_set():
            await instantly.prune()

    async def live(number: int) -> str:
        job_id = (await jobs.create(user_id=f"user-{number}")).job.job_id
        for _ in range(3):
            await publish(jobs)
            await jobs.submit(lease_of(await jobs.lock(job_id)), Released(reason="again"))
        if number % 2:
            await jobs.submit(lease_of(await jobs.lock(job_id)), success())
        return job_id

    pruning = [asyncio.create_task(prune()) for _ in range(2)]
    try:
        job_ids = await asyncio.gather(*(live(number) for number in range(8)))
    finally:
        busy.set()
        await asyncio.gather(*pruning)
    await publish(jobs)
    await instantly.prune()
    assert await ids(jobs) == set(job_ids)
    left = {row["aggregate_id"]: row["dedupe_key"].rpartition(":")[2] for row in await jobs.rows(outbox_events)}
    rows = {row["job_id"]: row for row in await jobs.rows(jobs_table)}
    assert left == {job_id: str(row["dispatch_no"]) for job_id, row in rows.items() if row["finished_at"] is None}


async def test_creates_of_many_users_go_on_while_their_jobs_are_deleted(jobs: Jobs) -> None:
    for number in range(20):
        await ended(jobs, user_id=f"user-{number}")
    await age(jobs, 31 * DAY)
    batch = [new_job(user_id=f"user-{number}") for number in range(20)]
    _, created = await asyncio.gather(retention(jobs).prune(), jobs.creation.create("backend", batch))
    assert all(isinstance(answer, Created) for answer in created)
    assert len(await ids(jobs)) == 20


@pytest.fixture
async def shared(mariadb_url: str) -> AsyncIterator[Jobs]:
    """Only there two transactions write at a time."""
    await migrate_by_copy(mariadb_url)
    database = Database(mariadb_url)
    yield Jobs(database)
    await database.close()


async def until_somebody_wants_a_user(tx: Transaction) -> None:
    """Wait until another transaction has got as far as to lock users, which are held."""
    statement = (
        "SELECT COUNT(*) FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID() AND info LIKE 'INSERT INTO users %'"
    )

    async def wanted() -> bool:
        return bool((await tx.execute(text(statement))).scalar_one())

    await until(wanted, "a transaction that locks users")


async def test_no_job_goes_under_a_create_that_has_found_it(shared: Jobs) -> None:
    """A create answers with the job of its key: it holds the user, and whoever deletes that user's jobs waits."""
    job_id = await ended(shared, idempotency_key="k1")
    await age(shared, 31 * DAY)
    pruning: list[asyncio.Task[None]] = []

    async def create(tx: Transaction) -> bool:
        await users.lock(tx, ["user-1"])
        pruning.append(asyncio.create_task(retention(shared).prune()))
        await until_somebody_wants_a_user(tx)
        return job_id in await job_store.get(tx, [job_id])

    assert await shared.database.write(create)
    await pruning[0]
    assert await ids(shared) == set()


async def test_a_retry_of_a_job_that_is_deleted_meanwhile_finds_none(shared: Jobs) -> None:
    job_id = await ended(shared, JobState.FAILED)
    retrying: list[asyncio.Task[JobRow]] = []

    async def delete(tx: Transaction) -> None:
        await users.lock(tx, ["user-1"])
        retrying.append(asyncio.create_task(retry(shared, job_id)))
        await until_somebody_wants_a_user(tx)
        await retention_store.delete_jobs(tx, [job_id])

    await shared.database.write(delete)
    with pytest.raises(JobNotFound):
        await retrying[0]
