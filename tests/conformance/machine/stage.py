"""Where the actors meet: the use cases on one database, its clock, and a look at all rows after every call."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Generic, TypeVar

from hypothesis import note
from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from aijobs.errors import AijobsError, InternalError
from services.jobs.quotas import Limits
from services.jobs.store.database import Database, Transaction
from tests.conformance.conftest import Jobs
from tests.conformance.machine.world import LIVE_LIMIT, MOST_TAKEOVERS, Reader, World, check, check_step

T = TypeVar("T")
#: What another actor does between two transactions; and a call that is made once more.
Meanwhile = Callable[[], Coroutine[Any, Any, None]]
Again = Meanwhile


class Clock:
    """The time that the database has: it passes only when told to."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC).replace(microsecond=0)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, span: timedelta) -> None:
        self.now += span


class SteeredDatabase(Database):
    """A database that follows a clock, and lets something happen between a read and the write that follows from it."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, pool_size=2, clock=clock)
        self.meanwhile: Meanwhile | None = None

        def follow(connection: Connection) -> None:
            # UTC_TIMESTAMP(6) follows this session variable, to the microsecond.
            connection.exec_driver_sql(f"SET timestamp = {clock.now.timestamp():.6f}")

        def hurry(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
            # Without the driver's thread: one caller at a time needs none, and all takes half the time.
            connection.driver_connection._execute = _at_once

        if self.sqlite:
            event.listen(self.engine.sync_engine, "connect", hurry)
        else:
            event.listen(self.engine.sync_engine, "begin", follow)

    async def write(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().write(work)


async def _at_once(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    return call(*arguments, **named)


@dataclass(frozen=True, kw_only=True)
class Step(Generic[T]):
    """A call, and all rows before and after it."""

    answer: T
    before: World
    after: World

    @property
    def quiet(self) -> bool:
        """True if the call changed nothing."""
        return self.before == self.after

    def refused(self, error: type[AijobsError]) -> bool:
        """Tell whether the call was refused so, and changed nothing."""
        answer = self.answer[0] if isinstance(self.answer, list) else self.answer
        return isinstance(answer, error) and self.quiet

    @property
    def news(self) -> dict[str, list[str]]:
        """The kinds of the new history entries, by job."""
        return self.after.news(self.before)


class Stage:
    """One database for many examples. Only `step` calls the services, so that every call is followed by the checks."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._reader = Reader(url)
        self.clock = Clock()
        self._url = url
        self.database = self.run(self._open())
        self.examples = 0
        #: What was called, and what was answered and written to a history: how often.
        self.calls: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.begin()

    async def _open(self) -> SteeredDatabase:
        return SteeredDatabase(self._url, self.clock)

    def begin(self) -> None:
        """Begin an example: with no rows."""
        self._reader.empty()
        self.database.meanwhile = None
        self.services = Jobs(
            self.database, most_takeovers=MOST_TAKEOVERS, limits=Limits(live=LIVE_LIMIT), sweep_patience=PATIENCE
        )
        self.world = self._reader.read()
        self.examples += 1
        #: False once a call, or a check of it, has failed.
        self.sound = True

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the event loop of the stage."""
        self.sound = False
        answer = self._loop.run_until_complete(call)
        self.sound = True
        return answer

    def close(self) -> None:
        """Close the database."""
        self.run(self.database.close())
        self._reader.close()
        self._loop.close()

    async def step(
        self,
        name: str,
        send: Callable[[], Awaitable[T]],
        *,
        beating: str | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Step[T]:
        """Call a use case and check what holds after every call.

        Args:
            name: what to say about it.
            send: the call.
            beating: the job whose heartbeat it is.
            meanwhile: what happens before the first transaction of it that writes.

        """
        self.clock.advance(TICK)
        self.database.meanwhile = meanwhile
        answer = await send()
        self.database.meanwhile = None
        step = Step(answer=answer, before=self.world, after=self._reader.read())
        self.world = step.after
        said = _said(answer)
        what = name.partition("(")[0]
        note(f"{self.clock.now:%H:%M:%S.%f} {name} → {said}")
        self.calls[what] += 1
        self.answers.update({f"{what}: {part}" for part in said.split("+")})
        assert InternalError.reason not in said
        check_step(step.before, step.after, beating)
        check(step.after)
        self.answers.update(f"history: {kind}" for kinds in step.news.values() for kind in kinds)
        return step


#: Time passes a little with every call, so that no two things happen at once.
TICK = timedelta(milliseconds=1)
PATIENCE = timedelta(seconds=10)
LEASE = timedelta(seconds=60)
LEASE_GRACE = timedelta(seconds=30)
SESSION_GRACE = timedelta(seconds=1)


async def answered(call: Awaitable[T]) -> T | AijobsError:
    """Return a refusal as an answer."""
    try:
        return await call
    except AijobsError as error:
        return error


def _said(answer: object) -> str:
    """Say in a word how a call was answered."""
    if isinstance(answer, list):
        return "+".join(map(_said, answer)) or "nothing"
    if isinstance(answer, AijobsError):
        return answer.reason
    if answer is None or isinstance(answer, bool | int | Enum):
        return str(answer)
    return type(answer).__name__
