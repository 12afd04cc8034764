"""Receiving messages and running the jobs they name.

A message stays unacknowledged while its run lasts, and the broker hands out at most `slots` of them, so one prefetch
bounds the work of a queue (ruling 17). Losing the connection stops no run: the broker gives the message to somebody
else, whose lock is refused. A new connection counts from zero, so it asks for as many messages as slots are free, for
none if none is, and for more as the runs of earlier connections end.

The process does not end because of the broker, however long it is away. It is not ready meanwhile, and again once the
broker has confirmed a consumer. Every try begins with a new connection to any of the addresses and keeps nothing of the
last one, so a new process could do no better, and the runs in hand would be lost for nothing.

Two ways to stop. At the end of the process, runs get the drain time, and those that need longer are given back, to be
taken over by another executor at once (EX-10). An operator's drain only ends the taking of jobs; runs go on to their
end.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import structlog

from aijobs.backoff import Backoff
from aijobs.broker.port import Broker, BrokerUnavailable, Consumer, Delivery
from aijobs.errors import AijobsError, ShuttingDown
from aijobs.logs import place_of
from aijobs.tracing import trace_id
from services.executor import messages
from services.executor.engine.engine import Engine
from services.executor.session import Load

#: How long a message whose job could not be locked is held before it goes back.
REQUEUE_PAUSE = timedelta(seconds=5)
#: How long the end of the process waits for runs to be given back.
HAND_BACK_WITHIN = timedelta(seconds=3)
#: How long a message may be held: after 30 minutes RabbitMQ closes the channel and gives it to somebody else.
LONGEST_HELD = timedelta(minutes=25)
log = structlog.get_logger()


class QueueConsumer:
    """A loop that consumes one queue until cancelled, then lets the runs in hand finish."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        slots: int,
        engine: Engine,
        drain_time: timedelta,
        *,
        may_start: asyncio.Event,
        hand_back: Callable[[], None],
    ) -> None:
        self.name = f"consumer of {queue}"
        self._broker = broker
        self._queue = queue
        self._slots = slots
        self._engine = engine
        self._drain_time = drain_time
        self._running: set[asyncio.Task[None]] = set()
        #: Those of earlier connections: this one's broker knows nothing of them.
        self._earlier: set[asyncio.Task[None]] = set()
        self._earlier_ended = asyncio.Event()
        self._backoff = Backoff()
        self._draining = False
        #: Cleared while a run that is started now could only run out of time.
        self._may_start = may_start
        self._hand_back = hand_back
        self._drained = asyncio.Event()
        #: Since when, by the loop's clock, there has been a slot for which messages are received; None: there is none.
        self._free_since: float | None = None
        #: Set while messages are really received.
        self.consuming = asyncio.Event()

    def load(self) -> Load:
        """Say how busy this executor is with the queue. Slots that nothing is received for are not free."""
        free = 0 if self._free_since is None else self._slots - len(self._running)
        idle = 0.0 if self._free_since is None else asyncio.get_running_loop().time() - self._free_since
        return Load(queue=self._queue, slots=self._slots, free_slots=max(free, 0), idle=timedelta(seconds=idle))

    def drain(self) -> None:
        """Take no more jobs; what runs goes on to its end."""
        self._drained.set()

    async def run(self) -> None:
        """Consume until cancelled; once drained, wait for that."""
        try:
            while not self._drained.is_set():
                self._earlier = set(self._running)
                prefetch = self._slots - len(self._earlier)
                consumer = self._broker.consumer(self._queue, prefetch)
                try:
                    async with consumer:
                        await self._consume(consumer, prefetch)
                except BrokerUnavailable as error:
                    log.warning("not consuming", queue=self._queue, error=str(error))
                if not self._drained.is_set():
                    await self._backoff.wait()
            await asyncio.Event().wait()
        finally:
            # Also when the broker is away just now: runs need the jobs service, not the broker.
            await self._drain()

    async def _consume(self, consumer: Consumer, prefetch: int) -> None:
        self._backoff.reset()
        taking = asyncio.create_task(self._take(consumer))
        widening = asyncio.create_task(self._widen(consumer, prefetch))
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait({taking, widening, drained}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (taking, widening):
                if ended.done():
                    ended.result()
                    return
            # The connection stays open for the acknowledgements of what still runs.
            widening.cancel()
            await self._stop_taking(consumer)
            while self._running:
                await asyncio.wait(self._running)
        except asyncio.CancelledError:
            widening.cancel()
            await self._stop_taking(consumer)
            await self._drain()
            raise
        finally:
            self.consuming.clear()
            self._free_since = None
            for task in (taking, widening, drained):
                task.cancel()
            await asyncio.gather(taking, widening, drained, return_exceptions=True)

    async def _widen(self, consumer: Consumer, granted: int) -> None:
        """Ask for messages for every slot that is free, until there are as many as slots.

        Raises:
            BrokerUnavailable: the broker did not confirm it.

        """
        while True:
            self._earlier_ended.clear()
            free = self._slots - len(self._earlier) - granted
            if free:
                await consumer.widen(free)
                granted += free
            if granted and not self.consuming.is_set():
                log.info("consuming", queue=self._queue, slots=self._slots)
                self.consuming.set()
                self._notice_free_slots()
            await self._earlier_ended.wait()

    async def _take(self, consumer: Consumer) -> None:
        async for delivery in consumer.deliveries():
            task = asyncio.create_task(self._handle(delivery))
            self._running.add(task)
            task.add_done_callback(self._ended)
            self._notice_free_slots()

    async def _stop_taking(self, consumer: Consumer) -> None:
        self._draining = True
        self.consuming.clear()
        self._free_since = None
        await consumer.stop()

    async def _drain(self) -> None:
        """Give what runs its time, then give back what needs longer, and at last cut off what cannot even do that."""
        self._draining = True
        self.consuming.clear()
        if not self._running:
            return
        log.info("draining", queue=self._queue, runs=len(self._running))
        _, left = await asyncio.wait(self._running, timeout=self._drain_time.total_seconds())
        if left:
            log.info("runs given back", queue=self._queue, runs=len(left))
            self._hand_back()
            _, left = await asyncio.wait(left, timeout=HAND_BACK_WITHIN.total_seconds())
        for task in left:
            task.cancel()
        if left:
            log.warning("runs cut off by the end of the process", queue=self._queue, runs=len(left))
            await asyncio.wait(left)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task in self._earlier:
            self._earlier.discard(task)
            self._earlier_ended.set()
        self._notice_free_slots()

    def _notice_free_slots(self) -> None:
        if len(self._running) >= self._slots or not self.consuming.is_set():
            self._free_since = None
        elif self._free_since is None:
            self._free_since = asyncio.get_running_loop().time()

    async def _handle(self, delivery: Delivery) -> None:
        held_until = asyncio.get_running_loop().time() + LONGEST_HELD.total_seconds()
        message = messages.read(delivery, self._queue)
        if message is None:
            await delivery.dead_letter()
            return
        await self._may_start.wait()
        if trace := trace_id(delivery.trace_context):
            # This task is the delivery's own: so are its context variables, in every line of the run's log.
            structlog.contextvars.bind_contextvars(trace_id=trace)
        try:
            await self._engine.run(str(message.job_id), going_on=lambda: not self._draining, held_until=held_until)
        except ShuttingDown:
            await delivery.requeue()
            return
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the slot must not leak
            # The job could not be locked, or the engine itself broke: somebody else may do better.
            log.error("job not run; its message goes back", job_id=str(message.job_id), error=_told(error))
            await asyncio.sleep(REQUEUE_PAUSE.total_seconds())
            await delivery.reject()
            return
        await delivery.ack()


def _told(error: BaseException) -> str:
    """Say what went wrong: our own errors have public words, of others only the place is ours to tell."""
    return error.message if isinstance(error, AijobsError) else place_of(error)
