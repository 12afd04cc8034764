"""Consuming from RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import structlog
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from aijobs.broker.port import BrokerUnavailable
from aijobs.broker.rabbitmq_connection import CONNECT_TIMEOUT, FAULTS, Connector, close
from aijobs.tracing import TRACEPARENT

#: How often a consumer checks that the broker answers and that its queue is there.
CHECK_INTERVAL = timedelta(seconds=30)
log = structlog.get_logger()


class RabbitMqDelivery:
    """Implements `aijobs.broker.port.Delivery`."""

    def __init__(self, message: AbstractIncomingMessage) -> None:
        self._message = message

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self._message.body

    @property
    def message_id(self) -> str:
        """The message's id."""
        return self._message.message_id or ""

    @property
    def trace_context(self) -> str:
        """The message's traceparent."""
        value = self._message.headers.get(TRACEPARENT)
        return value if isinstance(value, str) else ""

    async def ack(self) -> None:
        """Done with it."""
        try:
            await self._message.ack()
        except FAULTS as error:
            self._log_late(error)

    async def requeue(self) -> None:
        """Give it back."""
        try:
            await self._message.nack(requeue=True)
        except FAULTS as error:
            self._log_late(error)

    async def reject(self) -> None:
        """Give it back; the queue counts how often."""
        try:
            await self._message.reject(requeue=True)
        except FAULTS as error:
            self._log_late(error)

    async def dead_letter(self) -> None:
        """Reject it; the queue's dead-letter exchange takes it."""
        try:
            await self._message.reject(requeue=False)
        except FAULTS as error:
            self._log_late(error)

    def _log_late(self, error: BaseException) -> None:
        log.info("message settled too late; the broker gives it out again", error=type(error).__name__)


class RabbitMqConsumer:
    """Implements `aijobs.broker.port.Consumer` over a connection of its own.

    A prefetch cannot be changed once its consumer is there, so widening adds another consumer to the channel.

    A connection can look alive when nothing arrives on it any more: half-open, or after the broker forgot the consumer.
    So the broker is asked for the queue from time to time, on the same channel; no answer, or a bad one, ends the
    deliveries.
    """

    def __init__(
        self, connector: Connector, queue: str, prefetch: int, *, check_interval: timedelta = CHECK_INTERVAL
    ) -> None:
        self._connector = connector
        self._name = queue
        self._prefetch = prefetch
        self._check_interval = check_interval
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._queue: AbstractQueue | None = None
        self._checking: asyncio.Task[None] | None = None
        #: Of the consumers on the channel.
        self._tags: list[str] = []
        self._stopped = False
        #: Deliveries, then None once there will be no more.
        self._arrived: asyncio.Queue[RabbitMqDelivery | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Connect and start to consume."""
        connection = await self._connector.open(f"consumer of {self._name}")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                self._channel = channel = await connection.channel()
                self._queue = await channel.get_queue(self._name, ensure=False)
                connection.close_callbacks.add(self._ended)
                channel.close_callbacks.add(self._ended)
                await _on_cancel_by_broker(channel, self._ended)
                await self._consume(self._prefetch)
        except FAULTS as error:
            await close(connection)
            raise BrokerUnavailable("the broker broke off while starting to consume") from error
        self._connection = connection
        self._checking = asyncio.create_task(self._check(channel))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection; the broker gives unsettled messages to others."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})
        if self._connection is not None:
            await close(self._connection)
            self._connection = None

    async def stop(self) -> None:
        """Receive no more; what had arrived but was not yielded goes back."""
        self._stopped = True
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                while self._queue is not None and self._tags:
                    await self._queue.cancel(self._tags.pop())
        except FAULTS as error:
            log.info("consumer not cancelled in order", error=type(error).__name__)
        while not self._arrived.empty():
            if (delivery := self._arrived.get_nowait()) is not None:
                await delivery.requeue()
        self._ended()

    async def widen(self, by: int) -> None:
        """Add a consumer."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await self._consume(by)
        except FAULTS as error:
            raise BrokerUnavailable(f"the broker did not let us receive more of {self._name}") from error

    async def _consume(self, prefetch: int) -> None:
        # Without a bound the broker would send everything at once: that is what 0 means to it.
        if self._channel is None or self._queue is None or prefetch <= 0:
            return
        await self._channel.set_qos(prefetch_count=prefetch)
        self._tags.append(await self._queue.consume(self._received))

    async def _check(self, channel: AbstractChannel) -> None:
        while True:
            await asyncio.sleep(self._check_interval.total_seconds())
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                    await channel.declare_queue(self._name, passive=True)
            except FAULTS as error:
                log.warning("a check of the broker failed", queue=self._name, error=type(error).__name__)
                self._ended()
                return

    async def deliveries(self) -> AsyncIterator[RabbitMqDelivery]:
        """Yield messages until stopped, or until the connection or the consumer is gone."""
        while (delivery := await self._arrived.get()) is not None:
            yield delivery
        if self._stopped:
            return
        raise BrokerUnavailable(f"no longer consuming {self._name}")

    async def _received(self, message: AbstractIncomingMessage) -> None:
        self._arrived.put_nowait(RabbitMqDelivery(message))

    def _ended(self, *_: object) -> None:
        self._arrived.put_nowait(None)


async def _on_cancel_by_broker(channel: AbstractChannel, callback: Callable[..., None]) -> None:
    """Hear of a consumer that the broker cancelled: aio-pika itself says nothing (a deleted queue, a failover)."""
    underlay = await channel.get_underlay_channel()
    underlay.on_consumer_cancel_callbacks.add(callback)
