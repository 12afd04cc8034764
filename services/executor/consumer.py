"""Receiving messages and running the jobs they name.

A message stays unacknowledged while its run lasts, and the broker hands out at most `slots` of them, so one prefetch
bounds the work of a queue (ruling 17). Losing the connection stops no run: the broker gives the message to somebody
else, whose lock is refused.
"""

import asyncio
from datetime import timedelta
from uuid import UUID

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aijobs.backoff import Backoff
from aijobs.broker.port import LARGEST_BODY, Broker, BrokerUnavailable, Consumer, Delivery
from aijobs.errors import AijobsError, ShuttingDown
from aijobs.logs import place_of
from services.executor.engine.engine import Engine

#: How long a message that we cannot use is held before it goes back: a newer executor may know its job type.
REQUEUE_PAUSE = timedelta(seconds=5)
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
        #: Set while messages are really received.
        self.consuming = asyncio.Event()

    async def run(self) -> None:
        """Consume until cancelled."""
        try:
            while True:
                consumer = self._broker.consumer(self._queue, self._slots)
                try:
                    async with consumer:
                        await self._consume(consumer)
                except BrokerUnavailable as error:
                    log.warning("not consuming", queue=self._queue, error=str(error))
                await self._backoff.wait()
        finally:
            # Also when the broker is away just now: runs need the jobs service, not the broker.
            await self._drain()

    async def _consume(self, consumer: Consumer) -> None:
        log.info("consuming", queue=self._queue, slots=self._slots)
        self.consuming.set()
        self._backoff.reset()
        try:
            async for delivery in consumer.deliveries():
                task = asyncio.create_task(self._handle(delivery))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        except asyncio.CancelledError:
            # The connection stays open for the acknowledgements of what still runs.
            self._draining = True
            await consumer.stop()
            await self._drain()
            raise
        finally:
            self.consuming.clear()

    async def _drain(self) -> None:
        """Give what runs its time, and cut off what needs longer."""
        self._draining = True
        self.consuming.clear()
        if not self._running:
            return
        log.info("draining", queue=self._queue, runs=len(self._running))
        _, left = await asyncio.wait(self._running, timeout=self._drain_time.total_seconds())
        for task in left:
            task.cancel()
        if left:
            log.warning("runs cut off by the end of the process", queue=self._queue, runs=len(left))
            await asyncio.wait(left)

    async def _handle(self, delivery: Delivery) -> None:
        message = _parse(delivery)
        if message is None:
            await delivery.dead_letter()
            return
        if not self._engine.knows(message.job_type):
            log.warning("unknown job type; its message goes back", job_type=message.job_type)
            await asyncio.sleep(REQUEUE_PAUSE.total_seconds())
            await delivery.requeue()
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
