"""Executor sessions: who is there, who is told what, and what happens when one breaks (LC-8).

    hello ──▶ epoch 1 ──hello──▶ epoch 2 …           each hello of an executor begins a session, at any replica
                 │
              breaks: disconnected_at ──grace──▶ lost: its leases lapse, the epoch rises once more
                                         └ a new hello, or any successful call of the executor, ends the suspicion

The replica that held a session suspects its executor when the stream breaks. It notes that in the executor's row, gives
it a grace to come back, here or at another replica, and then ends its leases in one transaction that looks again: the
epoch must be the same, and no call of the executor may have succeeded since. It must also come in time: if the database
was away meanwhile, the executor could not come back either, and gets a full grace from then on. A replica that stops
suspects nobody. All of that is only to be quick; a lease that nobody renews ends by itself.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto

import structlog

from aijobs import metrics
from aijobs.backoff import Backoff
from aijobs.errors import SessionLost, ShuttingDown, Unavailable
from services.jobs.batches import FAULTS
from services.jobs.lapsing import JobLapsing
from services.jobs.store import executors
from services.jobs.store.database import Database, Transaction, describe
from services.jobs.store.executors import Hello, QueueLoad
from services.jobs.wakeups import Wakeups

#: How often cancels and drains of other replicas are looked for; those of this one are told at once.
POLL_INTERVAL = timedelta(milliseconds=500)
#: How long after the grace a look still says something: a hello that was sent within the grace is there by then.
SLOWEST_LOOK = timedelta(seconds=1)
LOST = metrics.counter("executors_lost", "Executors whose session broke and who did not come back")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRun:
    """Stop a run and confirm that it is cancelled."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no more jobs."""


Command = CancelRun | Drain


@dataclass(slots=True, eq=False)
class Session:
    """One open stream of an executor. Commands wait in it until the stream has sent them."""

    executor_id: str
    epoch: int
    commands: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    told: set[Command] = field(default_factory=set)

    def tell(self, command: Command) -> None:
        """Send a command, once a session."""
        if command not in self.told:
            self.told.add(command)
            self.commands.put_nowait(command)


class Verdict(Enum):
    """What a look at a suspect found."""

    #: It came back, or has given a sign of life.
    THERE = auto()
    #: Its leases have ended.
    LOST = auto()
    #: The look came too late to mean anything.
    TOO_LATE = auto()


class ExecutorSessions:
    """The sessions of this replica; `run` tells executors of cancels and drains."""

    name = "executor sessions"

    def __init__(self, database: Database, wakeups: Wakeups, lapsing: JobLapsing, *, grace: timedelta) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lapsing = lapsing
        self._grace = grace
        self._sessions: set[Session] = set()
        self._suspicions: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def open(self, hello: Hello) -> Session:
        """Begin a session. Earlier ones of the executor are over from here on.

        Raises:
            ShuttingDown: this replica takes no more sessions.
            SessionLost: the executor has said a later hello already.
            Unavailable: the database cannot be reached.

        """
        if self._stopping:
            raise ShuttingDown
        opening = asyncio.ensure_future(self._open(hello))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The stream broke before there was a session to close; once there is one, it is closed.
            opening.add_done_callback(self._close_opened)
            raise

    async def _open(self, hello: Hello) -> Session:
        epoch = await self._database.write(lambda tx: executors.say_hello(tx, hello))
        if epoch is None:
            raise SessionLost(f"executor {hello.executor_id}: hello {hello.hello_no} comes after a later one")
        session = Session(hello.executor_id, epoch)
        self._sessions.add(session)
        # What was requested while it was away is told with the next look, which is now.
        self._wakeups.commands.give()
        log.info("executor connected", executor_id=hello.executor_id, epoch=epoch)
        return session

    def _close_opened(self, opening: asyncio.Future[Session]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.close(opening.result())

    async def report(self, session: Session, queues: Sequence[QueueLoad]) -> None:
        """Store how busy an executor is.

        Raises:
            Unavailable: the database cannot be reached.

        """
        await self._database.write(lambda tx: executors.report(tx, session.executor_id, session.epoch, queues))

    def close(self, session: Session) -> None:
        """End a session whose stream broke; its executor is suspected unless this replica is stopping."""
        self._sessions.discard(session)
        if self._stopping:
            return
        log.info("executor disconnected", executor_id=session.executor_id, epoch=session.epoch)
        task = asyncio.create_task(self._suspect(session))
        self._suspicions.add(task)
        task.add_done_callback(self._suspicions.discard)

    async def leave(self, session: Session) -> None:
        """End a session whose executor says goodbye: nobody is suspected, and what it could not give back lapses."""
        self._sessions.discard(session)

        async def work(tx: Transaction) -> bool:
            executor = await executors.get(tx, session.executor_id, lock=True)
            if executor is None or executor.session_epoch != session.epoch:
                return False
            await self._lapsing.lapse_session(tx, executor.executor_id)
            await executors.remove(tx, executor.executor_id)
            return True

        if await self._database.write(work):
            log.info("executor left", executor_id=session.executor_id)

    def stop(self) -> None:
        """Suspect nobody any more: streams that end from here on end because of us."""
        self._stopping = True
        for task in self._suspicions:
            task.cancel()

    async def run(self) -> None:
        """Tell executors of cancels and drains until cancelled. Never ends by a fault of the database."""
        try:
            while True:
                seen = self._wakeups.commands.count
                if self._sessions:
                    try:
                        await self._tell_all()
                    except Unavailable:
                        log.warning("executors not told of cancels: the database cannot be reached")
                await self._wakeups.commands.beyond(seen, POLL_INTERVAL)
        finally:
            self.stop()

    async def _tell_all(self) -> None:
        ids = {session.executor_id for session in self._sessions}
        for wish in await self._database.read(lambda tx: executors.wishes(tx, ids)):
            for session in self._sessions:
                if session.executor_id != wish.executor_id:
                    continue
                if wish.drain:
                    session.tell(Drain())
                if wish.job_id is not None and wish.attempt is not None:
                    session.tell(CancelRun(job_id=wish.job_id, attempt=wish.attempt))

    async def _suspect(self, session: Session) -> None:
        """Give the executor of a broken session its grace, and end its leases if it does not come back."""
        backoff = Backoff()
        while True:
            try:
                if not await self._disconnect(session):
                    return
                await asyncio.sleep(self._grace.total_seconds())
                verdict = await self._judge(session)
            except Unavailable:
                await backoff.wait()
                continue
            except FAULTS as error:
                # The reaper takes the leases one by one, so that what cannot be written is in nobody's way.
                log.error("executor's leases not ended", executor_id=session.executor_id, error=describe(error))
                return
            if verdict is Verdict.TOO_LATE:
                log.warning("executor gets another grace: the database was slow", executor_id=session.executor_id)
                await backoff.wait()
                continue
            if verdict is Verdict.LOST:
                LOST.inc()
                log.warning("executor lost", executor_id=session.executor_id, epoch=session.epoch)
            return

    async def _disconnect(self, session: Session) -> bool:
        return await self._database.write(lambda tx: executors.disconnect(tx, session.executor_id, session.epoch))

    async def _judge(self, session: Session) -> Verdict:
        """End the leases of a suspect in one transaction that looks again."""

        async def work(tx: Transaction) -> Verdict:
            executor = await executors.get(tx, session.executor_id, lock=True)
            if executor is None or executor.session_epoch != session.epoch or not executor.under_suspicion:
                return Verdict.THERE
            latest = self._grace + max(self._grace, SLOWEST_LOOK)
            if executor.disconnected_at is None or executor.read_at - executor.disconnected_at > latest:
                return Verdict.TOO_LATE
            await self._lapsing.lapse_session(tx, executor.executor_id)
            await executors.lose(tx, executor)
            return Verdict.LOST

        return await self._database.write(work)
