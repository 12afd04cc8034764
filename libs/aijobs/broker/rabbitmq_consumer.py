"""Consuming from RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self

import structlog
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from aijobs.broker.port import BrokerUnavailable
from aijobs.broker.rabbitmq_connection import CONNECT_TIMEOUT, FAULTS, Connector, close

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

    async def dead_letter(self) -> None:
        """Reject it; the queue's dead-letter exchange takes it."""
        try:
            await self._message.reject(requeue=False)
        except FAULTS as error:
            self._log_late(error)

    def _log_late(self, error: BaseException) -> None:
        log.info("message settled too late; the broker gives it out again", error=type(error).__name__)


class RabbitMqConsumer:
    """Implements `aijobs.broker.port.Consumer` over a connection of its own."""

    def __init__(self, connector: Connector, queue: str, prefetch: int) -> None:
        self._connector = connector
        self._queue = queue
        self._prefetch = prefetch
        self._connection: AbstractConnection | None = None
        self._cancel: Callable[[], Awaitable[object]] | None = None
        self._stopped = False
        #: Deliveries, then None once there will be no more.
        self._arrived: asyncio.Queue[RabbitMqDelivery | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Connect and start to consume."""
        connection = await self._connector.open(f"consumer of {self._queue}")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                channel = await connection.channel()
                await channel.set_qos(prefetch_count=self._prefetch)
                queue = await channel.get_queue(self._queue, ensure=False)
                connection.close_callbacks.add(self._ended)
                channel.close_callbacks.add(self._ended)
                await _on_cancel_by_broker(channel, self._ended)
                tag = await queue.consume(self._received)
            self._cancel = partial(queue.cancel, tag)
        except FAULTS as error:
            await close(connection)
            raise BrokerUnavailable("the broker broke off while starting to consume") from error
        self._connection = connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection; the broker gives unsettled messages to others."""
        if self._connection is not None:
            await close(self._connection)
            self._connection = None

    async def stop(self) -> None:
        """Receive no more; what had arrived but was not yielded goes back."""
        self._stopped = True
        try:
            if self._cancel is not None:
                async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                    await self._cancel()
        except FAULTS as error:
            log.info("consumer not cancelled in order", error=type(error).__name__)
        while not self._arrived.empty():
            if (delivery := self._arrived.get_nowait()) is not None:
                await delivery.requeue()
        self._ended()

    async def deliveries(self) -> AsyncIterator[RabbitMqDelivery]:
        """Yield messages until stopped, or until the connection or the consumer is gone."""
        while (delivery := await self._arrived.get()) is not None:
            yield delivery
        if self._stopped:
            return
        raise BrokerUnavailable(f"no longer consuming {self._queue}")

    async def _received(self, message: AbstractIncomingMessage) -> None:
        self._arrived.put_nowait(RabbitMqDelivery(message))

    def _ended(self, *_: object) -> None:
        self._arrived.put_nowait(None)


async def _on_cancel_by_broker(channel: AbstractChannel, callback: Callable[..., None]) -> None:
    """Hear of a consumer that the broker cancelled: aio-pika itself says nothing (a deleted queue, a failover)."""
    underlay = await channel.get_underlay_channel()
    underlay.on_consumer_cancel_callbacks.add(callback)
