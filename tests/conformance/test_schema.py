"""The database repeats the invariants, and the migrations make the schema that the code expects."""

from datetime import UTC, datetime
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from aijobs.errors import Unavailable
from services.jobs.leasing import Locked
from services.jobs.migrate import SchemaOutdated, require_current, upgrade_with
from services.jobs.store import tables
from services.jobs.store.database import Database, Transaction
from tests.conformance.conftest import Jobs


def differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    found: list[Any] = compare_metadata(context, tables.metadata)
    return found


async def test_migrations_make_exactly_the_tables_of_the_code(database_url: str) -> None:
    await upgrade_with(database_url)
    database = Database(database_url)
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await database.close()


async def test_migrating_again_changes_nothing(database: Database, database_url: str) -> None:
    assert await upgrade_with(database_url) == []


@pytest.mark.parametrize("at", ["0001", "0002", "0003", "0004", "0005"])
async def test_a_migration_that_was_killed_goes_on_where_it_was(mariadb_url: str, at: str) -> None:
    """MySQL commits each statement by itself: some are done, the revision is not. SQLite does all of them or none."""
    database = Database(mariadb_url)
    await upgrade_with(mariadb_url, to=at)
    statements = {
        "0001": ("DROP TABLE model_invocations", "DROP TABLE job_snapshots", "DELETE FROM alembic_version"),
        "0002": (
            "DROP TABLE executors",
            "DROP INDEX ix_jobs_retry_of ON jobs",
            "ALTER TABLE jobs DROP CONSTRAINT ck_jobs_running_is_leased, DROP COLUMN legacy_status",
            "UPDATE alembic_version SET version_num = '0001'",
        ),
        "0003": (
            "DROP TABLE dispatchers",
            "DROP INDEX ix_outbox_events_settled_at ON outbox_events",
            "ALTER TABLE outbox_events DROP CONSTRAINT ck_outbox_events_pending_is_ranked",
            "ALTER TABLE queues DROP CONSTRAINT ck_queues_ready_has_time, DROP COLUMN ready",
            "UPDATE alembic_version SET version_num = '0002'",
        ),
        "0004": (
            "DROP INDEX ix_requests_job_id ON requests",
            "CREATE INDEX ix_requests_created_at ON requests (created_at)",
            "UPDATE alembic_version SET version_num = '0003'",
        ),
        "0005": (
            "DROP INDEX ix_jobs_parent_job_id ON jobs",
            "ALTER TABLE jobs DROP COLUMN run_timeout_ms",
            "UPDATE alembic_version SET version_num = '0004'",
        ),
    }[at]
    async with database.engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    assert (await upgrade_with(mariadb_url))[-1] == "0005"
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await database.close()


async def test_what_an_older_version_stored_is_kept(database_url: str) -> None:
    await upgrade_with(database_url, to="0001")
    database = Database(database_url)
    job_id = "0193" + "0" * 32
    values = {
        "job_id": job_id,
        "job_type": "testing",
        "lifecycle_status": "queued",
        "queue": "ai-interactive",
        "labels_json": "{}",
        "abort_strategy": "fail",
        "created_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }
    texts: tuple[str, ...] = (
        "user_id",
        "target_type",
        "target_id",
        "request_fingerprint",
        "definition_version",
    )
    numbers: tuple[str, ...] = (
        "priority",
        "progress",
        "cancellable",
        "max_retries",
        "backoff_ms",
        "retry_count",
        "attempt",
    )
    numbers += ("dispatch_no", "sequence", "artifact_count")
    values |= dict.fromkeys(texts, "x") | dict.fromkeys(numbers, 1)

    async def insert_old(tx: Transaction) -> None:
        tomorrow = "created_at + 86400000000" if tx.sqlite else "created_at + INTERVAL 1 DAY"
        # The columns that the old version knew.
        await tx.execute(tables.jobs.insert().values({tables.jobs.c[name]: value for name, value in values.items()}))
        await tx.execute(
            text(
                "INSERT INTO job_snapshots (job_id, schema_version, content_json, created_at)"
                " SELECT job_id, '1', '{}', created_at FROM jobs"
            )
        )
        await tx.execute(
            text(
                "INSERT INTO outbox_events (event_id, event_type, aggregate_type, aggregate_id, dedupe_key,"
                " payload_json, status, attempt_count, available_at, created_at, published_at)"
                " SELECT 'e', 'ai.job.enqueue', 'AiJob', job_id, 'k', '{}', 'pending', 0, created_at, created_at, NULL"
                " FROM jobs UNION SELECT 'd', 'ai.job.enqueue', 'AiJob', job_id, 'm', '{}', 'pending', 0,"
                f" {tomorrow}, created_at, NULL FROM jobs"
                " UNION SELECT 'x', 'ai.job.enqueue', 'AiJob', job_id, 'n', '{}', 'dead', 3, created_at, created_at,"
                " NULL FROM jobs UNION SELECT 'p', 'ai.job.enqueue', 'AiJob', job_id, 'l', '{}', 'published', 0,"
                " created_at, created_at, created_at FROM jobs"
            )
        )

    await database.write(insert_old)
    assert await upgrade_with(database_url) == ["0002", "0003", "0004", "0005"]
    jobs = Jobs(database)
    (row,) = await jobs.rows(tables.jobs)
    assert {name: row[name] for name in values} == values
    assert (row["takeover_count"], row["due_at"], row["legacy_status"]) == (0, None, "pending")
    assert (row["run_timeout_ms"], row["parent_job_id"], row["depth"]) == (None, None, 0)
    assert row["rank_at"] == row["created_at"]
    stored = await jobs.rows(tables.outbox_events, "event_id")
    created = row["created_at"]
    assert {event["queue"] for event in stored} == {"ai-interactive"}
    assert [tuple(event[name] for name in ("event_id", "status", "rank_at", "settled_at")) for event in stored] == [
        ("d", "scheduled", created, None),
        ("e", "pending", created, None),
        ("p", "published", created, created),
        ("x", "dead", created, created),
    ]
    assert [event.event_id for event in await jobs.claim()] == ["e"]
    assert isinstance(await jobs.try_lock(job_id), Locked)
    with pytest.raises(DBAPIError):
        await jobs.database.write(lambda tx: tx.execute(text("UPDATE jobs SET lapsed_at = created_at")))
    await database.close()


async def test_an_empty_database_is_refused_with_what_to_do(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(SchemaOutdated, match="aijobs migrate"):
        await require_current(database)
    await database.close()


@pytest.mark.parametrize(
    "assignment",
    [
        "lifecycle_status = 'paused'",
        "lifecycle_status = 'succeeded'",
        "lifecycle_status = 'running'",
        "finished_at = created_at",
        "lease_token = 'x'",
        "lock_until = created_at",
        "error_code = 'X'",
        "output_hash = 'x'",
        "cancel_requested_at = created_at",
        "priority = 101",
        "progress = -1",
    ],
)
async def test_a_row_that_breaks_an_invariant_cannot_be_stored(jobs: Jobs, assignment: str) -> None:
    await jobs.create()

    async def work(tx) -> None:
        await tx.execute(text(f"UPDATE jobs SET {assignment}"))

    with pytest.raises(DBAPIError):
        await jobs.database.write(work)


async def test_a_state_of_the_database_is_no_fault_of_what_was_to_be_written(jobs: Jobs) -> None:
    """A table that is missing, a disk that is full, a server that is read-only: repeat it later, it was not refused."""

    async def work(tx) -> None:
        await tx.execute(text("SELECT * FROM no_such_table"))

    with pytest.raises(Unavailable):
        await jobs.database.write(work)
    with pytest.raises(Unavailable):
        await jobs.database.read(work)
