"""The executor's session with the jobs service (LC-8).

One stream, open for as long as the process lives: it says who is here and how busy, and hears of cancels and drains at
once. When it breaks, the jobs service suspects that the process is gone; so it is opened again without delay, at
whatever replica answers, and all leases are renewed, which is a sign of life too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import grpc
import structlog

from aijobs.backoff import Backoff
from aijobs.errors import AijobsError, PermissionDenied, Unauthenticated, Unreachable
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import lifecycle_service_pb2
from services.executor.heartbeats import Heartbeats
from services.executor.lifecycle_client import LifecycleClient, SessionCall

#: Between two reports of how busy the executor is.
REPORT_INTERVAL = timedelta(seconds=5)
#: How long a lock waits for a session before it says that there is none.
OPEN_WITHIN = timedelta(seconds=1)
#: How long a hello waits for its welcome.
WELCOME_WITHIN = timedelta(seconds=10)
GOODBYE_WITHIN = timedelta(seconds=1)
#: Of so many failures in a row, which one is logged.
QUIET_FAILURES, MENTIONED_FAILURE = 20, 2
#: The grace of the jobs service is a second: between two tries there must be less.
FIRST_PAUSE = timedelta(milliseconds=20)
LONGEST_PAUSE = timedelta(milliseconds=500)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the executor is with a queue; `idle`: for how long there has been a free slot."""

    queue: str
    slots: int
    free_slots: int
    idle: timedelta


class Drainable(Protocol):
    """A consumer of a queue as the session sees it."""

    def load(self) -> Load:
        """Say how busy it is."""
        ...

    def drain(self) -> None:
        """Take no more jobs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Who says hello."""

    executor_id: str
    version: str
    job_types: Sequence[str]


class ExecutorSession:
    """A loop that keeps the session open until cancelled."""

    name = "session"

    def __init__(self, client: LifecycleClient, introduction: Introduction, heartbeats: Heartbeats) -> None:
        self._client = client
        self._introduction = introduction
        self._heartbeats = heartbeats
        self._consumers: Sequence[Drainable] = ()
        self._epoch = 0
        self._hellos = 0
        self._call: SessionCall | None = None
        #: Set while the jobs service knows us.
        self.open = asyncio.Event()

    def serve(self, consumers: Sequence[Drainable]) -> None:
        """Report and drain these consumers; called once, before `run`."""
        self._consumers = consumers

    async def epoch(self) -> int:
        """Return the epoch of the open session, waiting a little for one.

        Raises:
            Unreachable: there is none at the moment.

        """
        try:
            async with asyncio.timeout(OPEN_WITHIN.total_seconds()):
                await self.open.wait()
        except TimeoutError:
            raise Unreachable("", "no session is open") from None
        return self._epoch

    def lost(self, epoch: int) -> None:
        """Open a new session: the jobs service no longer knows the one of this epoch."""
        if epoch == self._epoch and self.open.is_set():
            self._closed()
            if self._call is not None:
                self._call.cancel()

    async def run(self) -> None:
        """Keep a session open until cancelled. Never ends by a fault of the jobs service."""
        backoff, refusals = Backoff(FIRST_PAUSE, LONGEST_PAUSE), Backoff()
        failures = 0
        while True:
            pause = backoff
            try:
                await self._keep(backoff.reset)
            except (Unauthenticated, PermissionDenied) as error:
                pause = refusals
                log.warning("session refused; check AIJOBS_TOKEN", error=error.message)
            except AijobsError as error:
                failures = 1 if self.open.is_set() else failures + 1
                # Streams end with the age of their connection; only one that cannot be opened again is worth a word.
                if failures % QUIET_FAILURES == MENTIONED_FAILURE:
                    log.warning("session not open", error=error.message)
            self._closed()
            await pause.wait()

    async def _keep(self, on_open: Callable[[], None]) -> None:
        """Open a session and keep it until it breaks.

        Raises:
            AijobsError: why it broke.

        """
        over = asyncio.Event()
        self._call = call = self._client.open_session(self._messages(over))
        try:
            async with asyncio.timeout(WELCOME_WITHIN.total_seconds()):
                first = await self._next(call, over)
            if first is None:
                raise Unreachable("", "the session was not welcomed")
            self._epoch = first.welcome.epoch
            self.open.set()
            on_open()
            log.info("session open", epoch=self._epoch)
            while (command := await self._next(call, over)) is not None:
                self._obey(command)
        except TimeoutError:
            raise Unreachable("", "the session was not welcomed in time") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            over.set()
            call.cancel()

    @staticmethod
    async def _next(call: SessionCall, over: asyncio.Event) -> lifecycle_service_pb2.OpenSessionResponse | None:
        """Read the next message; None if the stream is over. When cancelled, say goodbye first.

        Read in a task of its own, because gRPC cancels a whole call when a read of it is cancelled, and then nobody
        hears the goodbye.
        """
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            over.set()
            await asyncio.wait({reading}, timeout=GOODBYE_WITHIN.total_seconds())
            reading.cancel()
            reading.add_done_callback(_retrieve)
            raise
        if reading.cancelled():  # the session is lost, and `lost` has cancelled the call
            return None
        message = reading.result()
        return message if isinstance(message, lifecycle_service_pb2.OpenSessionResponse) else None

    async def _messages(self, over: asyncio.Event) -> AsyncIterator[lifecycle_service_pb2.OpenSessionRequest]:
        """Say hello, then report how busy we are, and goodbye when the session is over."""
        yield self._hello()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL.total_seconds()):
                    await over.wait()
            if over.is_set():
                # Heard only if the stream is not broken.
                yield lifecycle_service_pb2.OpenSessionRequest(goodbye=lifecycle_service_pb2.SessionGoodbye())
                return
            status = lifecycle_service_pb2.SessionStatus(queues=self._loads())
            yield lifecycle_service_pb2.OpenSessionRequest(status=status)

    def _obey(self, command: lifecycle_service_pb2.OpenSessionResponse) -> None:
        match command.WhichOneof("message"):
            case "cancel":
                self._heartbeats.cancel(command.cancel.job_id, command.cancel.attempt)
            case "drain":
                log.warning("an operator drains this executor: it takes no more jobs")
                for consumer in self._consumers:
                    consumer.drain()
            case _:
                pass  # a newer jobs service may say more

    def _hello(self) -> lifecycle_service_pb2.OpenSessionRequest:
        self._hellos += 1
        hello = lifecycle_service_pb2.SessionHello(
            hello_no=self._hellos,
            executor_id=self._introduction.executor_id,
            version=self._introduction.version,
            job_types=self._introduction.job_types,
            queues=self._loads(),
        )
        return lifecycle_service_pb2.OpenSessionRequest(hello=hello)

    def _loads(self) -> list[lifecycle_service_pb2.QueueLoad]:
        messages = []
        for load in (consumer.load() for consumer in self._consumers):
            message = lifecycle_service_pb2.QueueLoad(queue=load.queue, slots=load.slots, free_slots=load.free_slots)
            message.idle.FromTimedelta(load.idle)
            messages.append(message)
        return messages

    def _closed(self) -> None:
        if self.open.is_set():
            self.open.clear()
            self._heartbeats.renew_now()


def _retrieve(reading: asyncio.Future[Any]) -> None:
    if not reading.cancelled():
        reading.exception()
