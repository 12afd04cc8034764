"""Receiving messages and running the jobs they name.

A message stays unacknowledged while its run lasts, and the broker hands out at most `slots` of them, so one prefetch
bounds the work of a queue (ruling 17). Losing the connection stops no run: the broker gives the message to somebody
else, whose lock is refused.

Two ways to stop. At the end of the process, runs get the drain time, and those that need longer are given back, to be
taken over by another executor at once (EX-10). An operator's drain only ends the taking of jobs; runs go on to their
end.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aijobs.backoff import Backoff
from aijobs.broker.port import LARGEST_BODY, Broker, BrokerUnavailable, Consumer, Delivery
from aijobs.errors import AijobsError, ShuttingDown
from aijobs.logs import place_of
from services.executor.engine.engine import Engine
from services.executor.session import Load

#: How long a message whose job could not be locked is held before it goes back.
REQUEUE_PAUSE = timedelta(seconds=5)
#: How long the end of the process waits for runs to be given back.
HAND_BACK_WITHIN = timedelta(seconds=3)
log = structlog.get_logger()


class JobMessage(BaseModel):
    """The body of a work message (OB-9). More fields than these are a newer dispatcher's business."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job_id: UUID = Field(validation_alias="jobId")
    job_type: str = Field(validation_alias="jobType", min_length=1, max_length=64)


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
        self._free = asyncio.Semaphore(slots)
        self._running: set[asyncio.Task[None]] = set()
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
                consumer = self._broker.consumer(self._queue, self._slots)
                try:
                    async with consumer:
                        await self._consume(consumer)
                except BrokerUnavailable as error:
                    log.warning("not consuming", queue=self._queue, error=str(error))
                if not self._drained.is_set():
                    await self._backoff.wait()
            await asyncio.Event().wait()
        finally:
            # Also when the broker is away just now: runs need the jobs service, not the broker.
            await self._drain()

    async def _consume(self, consumer: Consumer) -> None:
        log.info("consuming", queue=self._queue, slots=self._slots)
        self.consuming.set()
        self._backoff.reset()
        self._notice_free_slots()
        taking = asyncio.create_task(self._take(consumer))
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait({taking, drained}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
                return
            # The connection stays open for the acknowledgements of what still runs.
            await self._stop_taking(consumer)
            while self._running:
                await asyncio.wait(self._running)
        except asyncio.CancelledError:
            await self._stop_taking(consumer)
            await self._drain()
            raise
        finally:
            taking.cancel()
            drained.cancel()
            self.consuming.clear()
            self._free_since = None

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
        self._notice_free_slots()

    def _notice_free_slots(self) -> None:
        if len(self._running) >= self._slots or not self.consuming.is_set():
            self._free_since = None
        elif self._free_since is None:
            self._free_since = asyncio.get_running_loop().time()

    async def _handle(self, delivery: Delivery) -> None:
        message = _parse(delivery)
        if message is None:
            await delivery.dead_letter()
            return
        # After a reconnect the broker counts from zero, so the slots are counted here too.
        async with self._free:
            await self._may_start.wait()
            try:
                await self._engine.run(str(message.job_id), going_on=lambda: not self._draining)
            except ShuttingDown:
                await delivery.requeue()
                return
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, the slot must not leak
                # The job could not be locked, or the engine itself broke: somebody else may do better.
                log.error("job not run; its message goes back", job_id=str(message.job_id), error=_told(error))
                await asyncio.sleep(REQUEUE_PAUSE.total_seconds())
                await delivery.requeue()
                return
        await delivery.ack()


def _parse(delivery: Delivery) -> JobMessage | None:
    if len(delivery.body) > LARGEST_BODY:
        log.error("poison message: too large", message_id=delivery.message_id, size=len(delivery.body))
        return None
    try:
        return JobMessage.model_validate_json(delivery.body)
    except ValidationError as error:
        # The body itself stays out of the log (AP-6).
        problems = [f"{'.'.join(map(str, p['loc']))}: {p['type']}" for p in error.errors(include_input=False)]
        log.error("poison message", message_id=delivery.message_id, problems=problems)
        return None


def _told(error: BaseException) -> str:
    """Say what went wrong: our own errors have public words, of others only the place is ours to tell."""
    return error.message if isinstance(error, AijobsError) else place_of(error)
