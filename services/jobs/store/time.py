"""The one clock: the database's (ruling 16).

MySQL keeps DATETIME(6) and asks UTC_TIMESTAMP(6). SQLite keeps integer microseconds and asks a function that
`database.py` registers, because Debian 12's SQLite has no sub-second clock of its own.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, bindparam
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def to_microseconds(moment: datetime) -> int:
    """Count the microseconds from 1970 to an aware time."""
    return (moment - EPOCH) // MICROSECOND


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time with microseconds."""

    impl = DATETIME
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the column type of a dialect."""
        return dialect.type_descriptor(BigInteger() if dialect.name == "sqlite" else DATETIME(fsp=6))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | datetime | None:
        """Translate an aware time for the driver."""
        if value is None:
            return None
        return to_microseconds(value) if dialect.name == "sqlite" else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: int | datetime | None, dialect: Dialect) -> datetime | None:
        """Translate the driver's value to an aware time."""
        del dialect
        if value is None:
            return None
        return EPOCH + value * MICROSECOND if isinstance(value, int) else value.replace(tzinfo=UTC)


class now(FunctionElement[datetime]):  # noqa: N801 - reads as the SQL function it is
    """The database's present time; constant within a statement."""

    type = UtcTime()
    inherit_cache = True


class _NowPlus(FunctionElement[datetime]):
    type = UtcTime()
    inherit_cache = True


def now_plus(span: timedelta) -> FunctionElement[datetime]:
    """Return the database's present time plus a span, which may be negative."""
    return _NowPlus(bindparam(None, span // MICROSECOND, type_=Integer()))


@compiles(now)
def _now_mysql(element: now, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    return "UTC_TIMESTAMP(6)"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    return "now_us()"


@compiles(_NowPlus)
def _now_plus_mysql(element: _NowPlus, compiler: SQLCompiler, **arguments: Any) -> str:
    return f"TIMESTAMPADD(MICROSECOND, {compiler.process(element.clauses, **arguments)}, UTC_TIMESTAMP(6))"


@compiles(_NowPlus, "sqlite")
def _now_plus_sqlite(element: _NowPlus, compiler: SQLCompiler, **arguments: Any) -> str:
    return f"(now_us() + {compiler.process(element.clauses, **arguments)})"
