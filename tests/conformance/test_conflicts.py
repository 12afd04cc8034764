"""Transactions that get into each other's way: the whole one is run again, and nobody ever sees half of it.

On MariaDB alone: SQLite has one writer, who cannot meet another.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection
from structlog.testing import capture_logs

from services.jobs.execution import Accepted
from services.jobs.lifecycle import Lease
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.database import Database, Transaction
from services.jobs.store.tables import job_artifacts, job_history, outbox_events, users
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.time import now
from tests.acceptance.waiting import until
from tests.conformance.conftest import Jobs, success

#: InnoDB ends the transaction that has changed less.
MUCH_WORK = 200


@pytest.fixture
def database_url(mariadb_url: str) -> str:
    return mariadb_url


@pytest.fixture
async def rival(database_url: str) -> AsyncIterator[AsyncConnection]:
    """A session of somebody else, in a transaction."""
    database = Database(database_url, pool_size=1)
    async with database.engine.connect() as connection:
        await connection.execute(text("SET foreign_key_checks = 0"))
        yield connection
        await connection.rollback()
    await database.close()


def artifacts(lease: Lease) -> Sequence[ArtifactRow]:
    return [
        ArtifactRow(job_id=lease.job_id, artifact_type="note", artifact_id=f"a{n}", ordinal=n, content_json="{}")
        for n in range(2)
    ]


async def put_in_the_way(rival: AsyncConnection, lease: Lease, what: str) -> None:
    """Insert, without committing, a row that a success is going to insert too."""
    match what:
        case "history":
            row = {"job_id": lease.job_id, "sequence": 3, "kind": "k", "to_state": "s", "attempt": 1, "actor": "rival"}
            await rival.execute(insert(job_history).values(at=now(), reason="", **row))
        case "artifact":
            row = {"job_id": lease.job_id, "artifact_type": "note", "artifact_id": "a1", "ordinal": 1}
            await rival.execute(insert(job_artifacts).values(created_at=now(), content_json="", **row))
        case "event":
            row = {"event_id": "rival", "event_type": "t", "aggregate_type": "t", "aggregate_id": lease.job_id}
            row |= {"dedupe_key": f"ai.job.completed:{lease.job_id}:1", "payload_json": "", "status": "pending"}
            times = {"rank_at": now(), "created_at": now()}
            await rival.execute(insert(outbox_events).values(attempt_count=0, **row, **times))


async def locked(jobs: Jobs, job_id: str) -> bool:
    """Tell whether some transaction holds the row of a job."""

    async def work(tx: Transaction) -> bool:
        rows = await tx.execute(
            select(jobs_table.c.job_id).where(jobs_table.c.job_id == job_id).with_for_update(skip_locked=True)
        )
        return rows.first() is None

    return await jobs.database.read(work)


async def stored(jobs: Jobs) -> Mapping[str, Any]:
    """Everything that a success writes, as anybody sees it now."""
    (job,) = await jobs.rows(jobs_table)
    return {
        "state": job["lifecycle_status"],
        "output": job["output_json"],
        "artifacts": [row["artifact_id"] for row in await jobs.rows(job_artifacts, "ordinal")],
        "history": await jobs.history(job["job_id"]),
        "events": [row["event_type"] for row in await jobs.rows(outbox_events, "id")],
    }


NOTHING = {
    "state": "running",
    "output": None,
    "artifacts": [],
    "history": ["created", "locked"],
    "events": ["ai.job.enqueue"],
}
EVERYTHING = {
    "state": "succeeded",
    "output": '{"text":"done"}',
    "artifacts": ["a0", "a1"],
    "history": ["created", "locked", "succeeded"],
    "events": ["ai.job.enqueue", "ai.job.completed"],
}


def restarts(logs: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return [entry["error"] for entry in logs if entry["event"] == "transaction restarted"]


@pytest.mark.parametrize("what", ["history", "artifact", "event"])
async def test_a_deadlock_in_the_middle_of_a_success_leaves_nothing_and_then_all(
    jobs: Jobs, rival: AsyncConnection, what: str
) -> None:
    """Case D2: each of us holds what the other one wants, wherever the success has got to."""
    lease = await jobs.running()
    await rival.execute(insert(users).values(created_at=now()), [{"user_id": f"rival-{n}"} for n in range(MUCH_WORK)])
    await put_in_the_way(rival, lease, what)
    with capture_logs() as logs:
        submitting = asyncio.create_task(jobs.submit(lease, success(artifacts=artifacts(lease))))
        await until(lambda: locked(jobs, lease.job_id), "the success holds the job")
        # Closes the circle. When it is answered, the other transaction has been ended.
        await rival.execute(select(jobs_table.c.job_id).where(jobs_table.c.job_id == lease.job_id).with_for_update())
        assert await stored(jobs) == NOTHING
        assert not submitting.done()
        await rival.rollback()
        answer = await submitting
    assert isinstance(answer, Accepted)
    assert [error.split()[-1] for error in restarts(logs)] == ["1213"]
    assert await stored(jobs) == EVERYTHING


@pytest.fixture
def impatient(database: Database) -> None:
    """Wait for locks for the shortest time that there is, so that the test does not wait for five seconds."""

    @event.listens_for(database.engine.sync_engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        cursor.close()


@pytest.mark.usefixtures("impatient")
async def test_a_lock_that_does_not_come_in_time_leaves_nothing_and_then_all(
    jobs: Jobs, rival: AsyncConnection
) -> None:
    """Case D2 with 1205, after which the server has undone the last statement alone, and not the transaction."""
    lease = await jobs.running()
    await put_in_the_way(rival, lease, "event")
    with capture_logs() as logs:
        submitting = asyncio.create_task(jobs.submit(lease, success(artifacts=artifacts(lease))))
        await until(lambda: restarts(logs), "the wait is over")
        assert await stored(jobs) == NOTHING
        await rival.rollback()
        answer = await submitting
    assert isinstance(answer, Accepted)
    assert {error.split()[-1] for error in restarts(logs)} == {"1205"}
    assert await stored(jobs) == EVERYTHING
