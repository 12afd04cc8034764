"""The database repeats the invariants, and the migrations make the schema that the code expects."""

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from aijobs.errors import Unavailable
from services.jobs.migrate import SchemaOutdated, require_current, upgrade_with
from services.jobs.store import tables
from services.jobs.store.database import Database
from tests.conformance.conftest import Jobs


def differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    found: list[Any] = compare_metadata(context, tables.metadata)
    return found


async def test_migrations_make_exactly_the_tables_of_the_code(database: Database) -> None:
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_migrating_again_changes_nothing(database: Database, database_url: str) -> None:
    assert await upgrade_with(database_url) == []


async def test_a_migration_that_was_killed_goes_on_where_it_was(database_url: str) -> None:
    """MySQL commits each CREATE by itself: some tables are there, the revision is not."""
    whole = Database(database_url)
    await upgrade_with(database_url)
    async with whole.engine.begin() as connection:
        for statement in (
            "DROP TABLE model_invocations",
            "DROP TABLE job_snapshots",
            "DROP INDEX ix_outbox_events_claim_token" + (" ON outbox_events" if "mysql" in database_url else ""),
            "DELETE FROM alembic_version",
        ):
            await connection.execute(text(statement))
    assert await upgrade_with(database_url) == ["0001"]
    async with whole.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await whole.close()


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
