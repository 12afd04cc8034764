"""Many at once: exactly one wins, and all or nothing is written."""

import asyncio
from contextlib import suppress
from uuid import uuid4

import pytest
from sqlalchemy import text

from aijobs.errors import InternalError, LeaseConflict, Unavailable
from services.jobs.leasing import Locked, LockRequest
from services.jobs.store.database import Database, Transaction
from services.jobs.store.tables import job_history, job_snapshots, outbox_events, requests
from services.jobs.store.tables import jobs as jobs_table
from tests.conformance.conftest import Jobs, new_job

LOCKERS = 64


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.long)])
async def test_of_64_lockers_exactly_one_wins_each_time(jobs: Jobs, rounds: int) -> None:
    """LC-4."""
    holders = [await jobs.holder(f"executor-{number}") for number in range(LOCKERS)]
    for _ in range(rounds):
        job_id = (await jobs.create(user_id=uuid4().hex)).job.job_id
        wishes = [LockRequest(job_id=job_id, lease_token=uuid4().hex) for _ in holders]
        results = await asyncio.gather(
            *(jobs.leasing.lock(holder, [wish]) for holder, wish in zip(holders, wishes, strict=True))
        )
        winners = [result for (result,) in results if isinstance(result, Locked)]
        assert len(winners) == 1
        assert [type(result) for (result,) in results].count(LeaseConflict) == LOCKERS - 1
        assert winners[0].job.lease_token in {wish.lease_token for wish in wishes}
    kinds = [row["kind"] for row in await jobs.rows(job_history)]
    assert (kinds.count("created"), kinds.count("locked"), len(kinds)) == (rounds, rounds, 2 * rounds)


async def test_when_the_event_cannot_be_inserted_there_is_no_job(jobs: Jobs) -> None:
    """CR-1: the database itself refuses the last of the inserts."""

    async def refuse_events(tx: Transaction) -> None:
        refuse = "SELECT RAISE(ABORT, 'no')" if tx.sqlite else "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'"
        each = "" if tx.sqlite else "FOR EACH ROW"
        await tx.execute(text(f"CREATE TRIGGER refuse BEFORE INSERT ON outbox_events {each} BEGIN {refuse}; END"))

    await jobs.database.write(refuse_events)
    with suppress(Unavailable):
        (result,) = await jobs.creation.create("backend", [new_job()])
        assert isinstance(result, InternalError)
    for table in (jobs_table, job_snapshots, job_history, outbox_events, requests):
        assert await jobs.rows(table) == [], table.name


async def test_a_dedupe_key_that_exists_aborts_the_create(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ruling 20: a swallowed conflict would leave a job without an event."""
    await jobs.create()
    (event,) = await jobs.rows(outbox_events)
    _, job_id, _ = event["dedupe_key"].split(":")

    async def forget_the_job(tx: Transaction) -> None:
        for table in ("job_snapshots", "job_history", "requests", "jobs"):
            await tx.execute(text(f"DELETE FROM {table}"))

    await jobs.database.write(forget_the_job)
    monkeypatch.setattr("services.jobs.creation.uuid7", lambda: job_id)
    (result,) = await jobs.creation.create("backend", [new_job()])
    assert isinstance(result, InternalError)
    assert await jobs.rows(jobs_table) == []


async def test_creates_of_different_users_do_not_wait_for_each_other(database: Database) -> None:
    jobs = Jobs(database)
    results = await asyncio.gather(*(jobs.create(user_id=f"user-{number}") for number in range(30)))
    assert len({result.job.job_id for result in results}) == 30
