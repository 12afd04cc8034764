"""RabbitMQ behind the broker port.

Plain connections and no library-made reconnecting: aio-pika's robust connections stay on a dead address, and a channel
that was opened during a leader election refuses every message for ever. Here whoever meets a fault drops the whole
connection, and the next `connect` tries every address again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self

import aio_pika
import structlog
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage
from aio_pika.exceptions import (
    AMQPError,
    ChannelInvalidStateError,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

from aijobs.broker.port import (
    LARGEST_BODY,
    BrokerUnavailable,
    Message,
    MessageRefused,
    QueueMissing,
    TopologyConflict,
)
from aijobs.broker.topology import (
    DEAD_LETTER_EXCHANGE,
    DEAD_LETTER_QUEUE,
    DEAD_LETTER_QUEUE_ARGUMENTS,
    EVENTS_EXCHANGE,
    WORK_EXCHANGE,
    WORK_QUEUE_ARGUMENTS,
    WORK_QUEUES,
)

CONNECT_TIMEOUT = timedelta(seconds=5)
#: Declaring a quorum queue for the first time takes a cluster a moment.
DECLARE_TIMEOUT = timedelta(seconds=15)
#: Everything that means "not now" or "no idea".
FAULTS = (AMQPError, OSError, asyncio.TimeoutError, ChannelInvalidStateError, RuntimeError)
log = structlog.get_logger()


class RabbitMqBroker:
    """Implements `aijobs.broker.port.Broker`.

    Args:
        urls: `amqp://user:password@host:port/vhost`, one per node; tried in order.

    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def publisher(self) -> "RabbitMqPublisher":
        """Return a publisher, not yet connected."""
        return RabbitMqPublisher(self)

    def consumer(self, queue: str, prefetch: int) -> "RabbitMqConsumer":
        """Return a consumer, not yet connected."""
        return RabbitMqConsumer(self, queue, prefetch)

    async def connection(self, name: str) -> AbstractConnection:
        """Open a connection to the first node that answers, with the topology declared.

        Raises:
            BrokerUnavailable: none answers.
            TopologyConflict: a queue or an exchange exists with other arguments.

        """
        for url in self._urls:
            try:
                connection = await aio_pika.connect(
                    url,
                    timeout=CONNECT_TIMEOUT.total_seconds(),
                    client_properties={"connection_name": f"aijobs {name}"},
                )
            except FAULTS as error:
                log.debug("broker node does not answer", error=type(error).__name__)
                continue
            try:
                await _declare(connection)
            except TopologyConflict:
                await _close(connection)
                raise
            except FAULTS as error:
                await _close(connection)
                log.debug("broker node broke off", error=type(error).__name__)
                continue
            return connection
        raise BrokerUnavailable(f"none of {len(self._urls)} broker addresses answers")


class RabbitMqPublisher:
    """Implements `aijobs.broker.port.Publisher` over a connection of its own, with confirms."""

    def __init__(self, broker: RabbitMqBroker) -> None:
        self._broker = broker
        self._connection: AbstractConnection | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        #: False: a work queue was found missing, so the next connect declares all of them.
        self._declared = True
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, unless connected."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed:
                if not self._declared:
                    await self._declare_again(self._connection)
                return
            connection = await self._broker.connection("publisher")
            try:
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                self._exchanges = {
                    name: await channel.get_exchange(name, ensure=False) for name in (WORK_EXCHANGE, EVENTS_EXCHANGE)
                }
            except FAULTS as error:
                await _close(connection)
                raise BrokerUnavailable("the broker broke off while connecting") from error
            self._connection = connection
            self._declared = True

    async def _declare_again(self, connection: AbstractConnection) -> None:
        try:
            await _declare(connection)
        except FAULTS as error:
            await self._drop(connection)
            raise BrokerUnavailable("the broker broke off while declaring") from error
        self._declared = True

    async def publish(self, message: Message, within: timedelta) -> None:
        """Publish a message and wait for its confirm."""
        if len(message.body) > LARGEST_BODY:
            raise MessageRefused(f"{len(message.body)} bytes; at most {LARGEST_BODY}")
        connection = self._connection
        if connection is None or connection.is_closed:
            raise BrokerUnavailable("not connected")
        work = message.queue is not None
        exchange = self._exchanges[WORK_EXCHANGE if work else EVENTS_EXCHANGE]
        try:
            await exchange.publish(
                aio_pika.Message(
                    message.body,
                    content_type="application/json",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    message_id=message.message_id,
                    correlation_id=message.correlation_id,
                ),
                routing_key=message.queue or message.topic,
                mandatory=work,
                timeout=within.total_seconds(),
            )
        except PublishError as error:
            # Returned: nothing is bound there. The connection is as good as before for every other message.
            self._declared = False
            raise QueueMissing(f"no queue {message.queue}") from error
        except DeliveryError as error:
            # Nacked: a channel opened during a leader election nacks for ever, so it must go.
            await self._drop(connection)
            raise BrokerUnavailable("the broker did not take the message") from error
        except FAULTS as error:
            await self._drop(connection)
            raise BrokerUnavailable("no confirm; whether the broker has the message is unknown") from error

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._drop(self._connection)

    async def _drop(self, connection: AbstractConnection) -> None:
        # Several publishes of one window may fail together; only the first drops the connection they share.
        if self._connection is connection:
            self._connection = None
            await _close(connection)


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

    def __init__(self, broker: RabbitMqBroker, queue: str, prefetch: int) -> None:
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._connection: AbstractConnection | None = None
        self._cancel: Callable[[], Awaitable[object]] | None = None
        self._stopped = False
        #: Deliveries, then None once there will be no more.
        self._arrived: asyncio.Queue[RabbitMqDelivery | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Connect and start to consume."""
        connection = await self._broker.connection(f"consumer of {self._queue}")
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
            await _close(connection)
            raise BrokerUnavailable("the broker broke off while starting to consume") from error
        self._connection = connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection; the broker gives unsettled messages to others."""
        if self._connection is not None:
            await _close(self._connection)
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


async def _declare(connection: AbstractConnection) -> None:
    # A broker that takes connections and answers nothing (no majority, an alarm) must not hold us for ever.
    async with asyncio.timeout(DECLARE_TIMEOUT.total_seconds()):
        await _declare_all(connection)


async def _declare_all(connection: AbstractConnection) -> None:
    channel = await connection.channel()
    try:
        work = await channel.declare_exchange(WORK_EXCHANGE, aio_pika.ExchangeType.DIRECT, durable=True)
        dead = await channel.declare_exchange(DEAD_LETTER_EXCHANGE, aio_pika.ExchangeType.FANOUT, durable=True)
        await channel.declare_exchange(EVENTS_EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
        dead_queue = await channel.declare_queue(
            DEAD_LETTER_QUEUE, durable=True, arguments=dict(DEAD_LETTER_QUEUE_ARGUMENTS)
        )
        await dead_queue.bind(dead)
        for name in WORK_QUEUES:
            queue = await channel.declare_queue(name, durable=True, arguments=dict(WORK_QUEUE_ARGUMENTS))
            await queue.bind(work, routing_key=name)
    except ChannelPreconditionFailed as error:
        raise TopologyConflict(
            f"the broker holds a queue or an exchange with other arguments than ours ({error}); "
            "delete it there while nothing uses it, or use another virtual host"
        ) from error
    finally:
        if not channel.is_closed:
            await channel.close()


async def _close(connection: AbstractConnection) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            await connection.close()
    except FAULTS as error:
        log.debug("connection not closed in order", error=type(error).__name__)
