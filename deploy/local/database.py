"""A MySQL or MariaDB server as its clients see it: an address on which databases are made and dropped."""

import asyncio
import re
import warnings
from dataclasses import dataclass

import aiomysql
from sqlalchemy.engine import URL, make_url

_NAME = re.compile(r"^[A-Za-z0-9_]{1,64}$")
_CONNECT_SECONDS = 5


class UnreachableError(Exception):
    """A server does not answer, or refuses us; the message names the server without its password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseAddress:
    """Where a database server is and how to log in. The user may create and drop databases."""

    host: str
    port: int
    user: str
    password: str

    @classmethod
    def parse(cls, text: str) -> "DatabaseAddress":
        """Read a SQLAlchemy URL such as `mysql+aiomysql://user:password@host:3306`; a database name is ignored.

        Raises:
            ValueError: it is no MySQL or MariaDB URL.

        """
        url = make_url(text)
        if url.get_backend_name() not in {"mysql", "mariadb"} or not url.host or not url.username:
            raise ValueError("expected a URL like mysql+aiomysql://user:password@host:3306")
        return cls(host=url.host, port=url.port or 3306, user=url.username, password=url.password or "")

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database, password included."""
        url = URL.create("mysql+aiomysql", self.user, self.password, self.host, self.port, database)
        return url.render_as_string(hide_password=False)

    async def create_database(self, name: str, *, exist_ok: bool = False) -> str:
        """Create an empty database and return its SQLAlchemy URL.

        Args:
            name: of the database.
            exist_ok: take the one that is there as it is.

        Raises:
            ValueError: the name is not 1 to 64 letters, digits and underscores.
            UnreachableError: the server does not answer.

        """
        if exist_ok:
            # The server warns of what we asked for.
            warnings.filterwarnings("ignore", message=".*database exists", category=aiomysql.Warning)
        await self._execute(
            f"CREATE DATABASE {'IF NOT EXISTS' if exist_ok else ''} {_quoted(name)} CHARACTER SET utf8mb4"
        )
        return self.url(name)

    async def drop_database(self, name: str) -> None:
        """Drop a database; nothing happens if there is none of that name.

        Raises:
            ValueError: the name is not 1 to 64 letters, digits and underscores.
            UnreachableError: the server does not answer.

        """
        await self._execute(f"DROP DATABASE IF EXISTS {_quoted(name)}")

    async def ping(self) -> None:
        """Log in and run a statement.

        Raises:
            UnreachableError: that did not work within 5 s.

        """
        await self._execute("SELECT 1")

    async def _execute(self, statement: str) -> None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await aiomysql.connect(
                    host=self.host, port=self.port, user=self.user, password=self.password
                )
        except (OSError, TimeoutError, aiomysql.Error) as error:
            raise UnreachableError(f"the database server {self.user}@{self.host}:{self.port}: {error}") from error
        try:
            cursor = await connection.cursor()
            await cursor.execute(statement)
        finally:
            connection.close()


def _quoted(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"bad database name {name!r}: expected 1 to 64 letters, digits and underscores")
    return f"`{name}`"
