"""Bringing a database to this version's schema (`aijobs migrate`).

Replicas that start together may all call it: on MySQL an advisory lock lets one work and the others wait.
"""

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from aijobs.errors import Unavailable
from aijobs.service import CannotRun
from services.jobs.store.database import Database, describe

MIGRATIONS = Path(__file__).parent / "store" / "migrations"
LOCK_NAME = "aijobs_migrate"
LOCK_WAIT_SECONDS = 60


class SchemaOutdated(CannotRun):
    """The database's schema is not this version's."""


def upgrade(database_url: str) -> list[str]:
    """Apply every migration that is missing and return their revisions, oldest first.

    Raises:
        ValueError: not a database URL that we run on.
        Unavailable: the database cannot be reached, or another migration runs for more than a minute.

    """
    return asyncio.run(upgrade_with(database_url))


async def upgrade_with(database_url: str, *, to: str = "head") -> list[str]:
    """Do the same inside a running event loop, up to a revision."""
    database = Database(database_url, pool_size=1)
    if database.sqlite:
        event.listen(database.engine.sync_engine, "connect", _without_foreign_keys)
    try:
        async with database.engine.connect() as connection:
            applied = await connection.run_sync(_upgrade, to)
            await connection.commit()
            return applied
    except (OSError, DBAPIError) as error:
        raise Unavailable(f"the database cannot be reached or refuses the migration: {describe(error)}") from error
    finally:
        await database.close()


def _without_foreign_keys(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Let SQLite replace a table that others refer to: that is how it changes a constraint."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = OFF")
    cursor.close()


async def require_current(database: Database) -> None:
    """Check that the schema is this version's.

    Raises:
        SchemaOutdated: it is not; the message says what to do.
        Unavailable: the database cannot be reached.

    """
    try:
        async with database.engine.connect() as connection:
            present = await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
    except (OSError, DBAPIError) as error:
        raise Unavailable("the database cannot be reached") from error
    wanted = ScriptDirectory.from_config(_config()).get_current_head()
    if present != wanted:
        raise SchemaOutdated(
            f"the database is at revision {present or 'none'}, this version needs {wanted}: run `aijobs migrate`"
        )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _upgrade(connection: Connection, to: str) -> list[str]:
    mysql = connection.dialect.name != "sqlite"
    if mysql:
        got = connection.execute(text("SELECT GET_LOCK(:name, :wait)"), {"name": LOCK_NAME, "wait": LOCK_WAIT_SECONDS})
        if got.scalar_one() != 1:
            raise Unavailable("another migration has been running for a minute")
    config = _config()
    before = MigrationContext.configure(connection).get_current_revision()
    config.attributes["connection"] = connection
    command.upgrade(config, to)
    if mysql:
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": LOCK_NAME})
    applied = ScriptDirectory.from_config(config).iterate_revisions(to, before)
    return [script.revision for script in reversed(list(applied)) if script.revision != before]
