"""The database and its transactions.

A transaction runs in a task of its own and is shielded: when a caller goes away in the middle, the few statements left
are finished instead of burning the connection (engineering: raw cancellation threw half the connections away).

Deadlocks, lock timeouts and lost connections restart the **whole** transaction, also when the answer to COMMIT was
lost. That is right because every write of this service carries an identity (request id, lease token, claim token, call
number) under which the second run finds what the first one may have committed, and gives the same answer.
"""

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import structlog
from sqlalchemy import URL, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from aijobs.errors import Unavailable
from services.jobs.store.time import to_microseconds

T = TypeVar("T")
log = structlog.get_logger()

#: Deadlock, lock wait timeout, snapshot conflict (MariaDB): nothing is wrong but the moment.
CONFLICTS = frozenset({1213, 1205, 1020})
#: The connection is gone; whether a COMMIT in flight took effect is unknown.
CONNECTION_LOST = frozenset({2006, 2013, 2014, 2055, 1927, 4031, 1053, 1317, 0})
#: A CHECK constraint, on MySQL and MariaDB; not everywhere an IntegrityError.
CHECK_VIOLATED = frozenset({3819, 4025})
#: Tries of one transaction, and the longest pause between two of them.
TRIES = 5
LONGEST_PAUSE = timedelta(milliseconds=200)
#: How long a transaction whose caller went away may still run.
ORPHAN_LIMIT = timedelta(seconds=5)

DRIVERS = frozenset({"mysql+aiomysql", "mariadb+aiomysql", "mysql+asyncmy", "mariadb+asyncmy", "sqlite+aiosqlite"})

Clock = Callable[[], datetime]


def system_clock() -> datetime:
    """Return the present time of this machine; only SQLite uses it, as the database's clock."""
    return datetime.now(UTC)


class Transaction:
    """One transaction: what runs statements, and what is to happen once it has committed."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.execute = connection.execute
        self._after_commit: list[Callable[[], None]] = []

    @property
    def sqlite(self) -> bool:
        """True on SQLite, where BEGIN IMMEDIATE has already taken the only write lock there is."""
        return self.connection.dialect.name == "sqlite"

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the transaction has committed; never if it rolls back."""
        self._after_commit.append(callback)

    def committed(self) -> None:
        """Run the callbacks; called by `Database` alone."""
        for callback in self._after_commit:
            callback()


class Database:
    """Opens connections and runs transactions.

    Args:
        url: SQLAlchemy URL, `mysql+aiomysql://…` or `sqlite+aiosqlite:///path`.
        pool_size: connections at most.
        clock: SQLite only: the time that `now()` returns.

    Raises:
        ValueError: the URL is not one, or names a database we do not run on.

    """

    def __init__(self, url: str, *, pool_size: int = 10, clock: Clock = system_clock) -> None:
        parsed = check_url(url)
        self.sqlite = parsed.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(parsed, pool_size, clock) if self.sqlite else _mysql_engine(parsed, pool_size)
        # SQLite has one writer; waiting for it here is fair, waiting inside SQLite is not.
        self._writer = asyncio.Semaphore(1 if self.sqlite else pool_size)
        self._running: set[asyncio.Task[Any]] = set()

    async def write(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run `work` in a transaction and commit it.

        `work` may run more than once and must only touch its transaction.

        Raises:
            Unavailable: the database cannot be reached or is not as it must be; a commit may or may not have happened.
            DBAPIError: what was to be written breaks a constraint or does not fit a column.

        """
        return await self._shielded(self._with_retries(work, read_only=False))

    async def read(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run `work` in a transaction that writes nothing.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._shielded(self._with_retries(work, read_only=True))

    async def close(self) -> None:
        """Wait for running transactions, then close every connection."""
        if self._running:
            await asyncio.wait(self._running, timeout=ORPHAN_LIMIT.total_seconds())
        await self.engine.dispose()

    async def _shielded(self, transaction: Awaitable[T]) -> T:
        task = asyncio.ensure_future(transaction)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                asyncio.get_running_loop().call_later(ORPHAN_LIMIT.total_seconds(), task.cancel)
                task.add_done_callback(_retrieve)
            raise

    async def _with_retries(self, work: Callable[[Transaction], Awaitable[T]], *, read_only: bool) -> T:
        for attempt in range(1, TRIES + 1):
            try:
                return await self._once(work, read_only=read_only)
            except PoolTimeoutError as error:
                raise Unavailable("the database has no free connection") from error
            except (OSError, DBAPIError) as error:
                if _is_of_an_item(error):
                    raise
                if not _worth_repeating(error):
                    log.error("transaction refused", error=describe(error))
                    raise Unavailable("the database refuses the transaction") from error
                if attempt == TRIES:
                    log.warning("transaction given up", error=describe(error), tries=attempt)
                    raise Unavailable("the database cannot be reached right now") from error
                log.info("transaction restarted", error=describe(error), attempt=attempt)
            await asyncio.sleep(random.uniform(0.1, 1.0) * LONGEST_PAUSE.total_seconds() * attempt / TRIES)  # noqa: S311
        raise AssertionError("unreachable")

    async def _once(self, work: Callable[[Transaction], Awaitable[T]], *, read_only: bool) -> T:
        if read_only:
            async with self.engine.connect() as connection:
                await connection.execution_options(aijobs_read_only=True)
                return await work(Transaction(connection))
        async with self._writer, self.engine.begin() as connection:
            transaction = Transaction(connection)
            result = await work(transaction)
        transaction.committed()
        return result


def check_url(url: str) -> URL:
    """Parse a database URL.

    Raises:
        ValueError: it is none, or names a database that we do not run on.

    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError("not a database URL; use mysql+aiomysql://user:password@host:port/name") from error
    if parsed.drivername not in DRIVERS:
        raise ValueError(f"no support for {parsed.drivername}; use mysql+aiomysql:// or sqlite+aiosqlite:///")
    if not parsed.database or parsed.database == ":memory:":
        raise ValueError(
            "names no database; use mysql+aiomysql://user:password@host:port/name or sqlite+aiosqlite:///path"
        )
    return parsed


def _mysql_engine(url: URL, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=5,
        pool_recycle=1800,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 5},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        # Waiting 50 s (the default) for a row lock outlives every deadline. Strict mode: no silent truncation.
        cursor.execute(
            "SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = 5,"
            " sql_mode = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'"
        )
        cursor.close()

    return engine


def _sqlite_engine(url: URL, pool_size: int, clock: Clock) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=pool_size, max_overflow=0, pool_timeout=5)

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver's own transaction handling defers BEGIN and loses updates; we begin ourselves, below.
        connection.isolation_level = None
        connection.create_function("now_us", 0, lambda: to_microseconds(clock()))
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "busy_timeout = 5000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        read_only = connection.get_execution_options().get("aijobs_read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _is_of_an_item(error: OSError | DBAPIError) -> bool:
    """Tell whether a statement failed for what it was to write, and not for the state of the database."""
    return isinstance(error, IntegrityError | DataError) or (
        isinstance(error, DBAPIError) and _code(error) in CHECK_VIOLATED
    )


def _worth_repeating(error: OSError | DBAPIError) -> bool:
    if isinstance(error, OSError):
        return True
    if isinstance(error.orig, sqlite3.OperationalError):
        return "locked" in str(error.orig) or "unable to open" in str(error.orig)
    code = _code(error)
    if code in CONFLICTS or code in CONNECTION_LOST or error.connection_invalidated:
        return True
    return isinstance(error, InterfaceError | OperationalError) and code in range(2000, 2062)


def _code(error: DBAPIError) -> int | None:
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def describe(error: Exception) -> str:
    """Name a database error by class and code: statement and parameters stay out of the log (AP-6)."""
    if not isinstance(error, DBAPIError):
        return type(error).__name__
    if isinstance(error.orig, sqlite3.Error):
        return f"{type(error.orig).__name__} {getattr(error.orig, 'sqlite_errorname', '')}".rstrip()
    return f"{type(error.orig).__name__} {_code(error)}"


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.info("transaction failed after its caller had gone", error=type(task.exception()).__name__)
