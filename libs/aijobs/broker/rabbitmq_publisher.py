"""Publishing to RabbitMQ with confirms."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta

import aio_pika
import structlog
from aio_pika.abc import AbstractConnection, AbstractExchange
from aio_pika.exceptions import ChannelNotFoundEntity, DeliveryError, PublishError

from aijobs.broker.port import LARGEST_BODY, BrokerUnavailable, Message, MessageRefused, QueueMissing
from aijobs.broker.rabbitmq_connection import FAULTS, Connector, close, declare, is_blocked, is_open
from aijobs.broker.rabbitmq_depths import DepthReader
from aijobs.broker.topology import EVENTS_EXCHANGE, WORK_EXCHANGE
from aijobs.tracing import TRACEPARENT

log = structlog.get_logger()


class RabbitMqPublisher:
    """Implements `aijobs.broker.port.Publisher` over a connection of its own, with confirms.

    A broker with an alarm (memory, disk) reads nothing more from connections that publish, and tells them when they
    try. Such a connection is kept: the broker reads on where it stopped once the alarm is over, whereas every new
    connection would swallow some messages more before it is told.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._connection: AbstractConnection | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._depth_reader: DepthReader | None = None
        #: False: a work queue was found missing, so the next connect declares all of them.
        self._declared = True
        self._blocked = False
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, unless connected."""
        async with self._connecting:
            if self._connection is not None and is_open(self._connection):
                await self._require_unblocked(self._connection)
                if not self._declared:
                    await self._declare_again(self._connection)
                return
            if self._connection is not None:
                await self._drop(self._connection)
            connection = await self._connector.open("publisher")
            try:
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                self._exchanges = {
                    name: await channel.get_exchange(name, ensure=False) for name in (WORK_EXCHANGE, EVENTS_EXCHANGE)
                }
            except FAULTS as error:
                await close(connection)
                raise BrokerUnavailable("the broker broke off while connecting") from error
            self._connection = connection
            self._depth_reader = DepthReader(connection)
            self._declared = True
            self._notice(blocked=False)

    async def _declare_again(self, connection: AbstractConnection) -> None:
        try:
            await declare(connection)
        except FAULTS as error:
            await self._drop(connection)
            raise BrokerUnavailable("the broker broke off while declaring") from error
        self._declared = True

    async def publish(self, message: Message, within: timedelta) -> None:
        """Publish a message and wait for its confirm."""
        if len(message.body) > LARGEST_BODY:
            raise MessageRefused(f"{len(message.body)} bytes; at most {LARGEST_BODY}")
        connection = self._connection
        if connection is None or not is_open(connection):
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
                    headers={TRACEPARENT: message.trace_context} if message.trace_context else None,
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
            if not await self._is_blocked(connection):
                await self._drop(connection)
            raise BrokerUnavailable("no confirm; whether the broker has the message is unknown") from error

    async def depths(self, within: timedelta) -> Mapping[str, int]:
        """Count the messages that wait, by passive declares."""
        connection, reader = self._connection, self._depth_reader
        if connection is None or reader is None or not is_open(connection):
            raise BrokerUnavailable("not connected")
        await self._require_unblocked(connection)
        try:
            return await reader.read(within)
        except ChannelNotFoundEntity as error:
            self._declared = False
            raise QueueMissing("a work queue does not exist") from error
        except FAULTS as error:
            # Whoever asks before publishing would otherwise never find out that the connection is dead.
            if not await self._is_blocked(connection):
                await self._drop(connection)
            raise BrokerUnavailable("the broker did not say how many messages wait") from error

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._drop(self._connection)

    async def _require_unblocked(self, connection: AbstractConnection) -> None:
        if await self._is_blocked(connection):
            raise BrokerUnavailable("the broker takes no messages: it has raised an alarm (memory or disk)")

    async def _is_blocked(self, connection: AbstractConnection) -> bool:
        blocked = is_open(connection) and await is_blocked(connection)
        if connection is self._connection:
            self._notice(blocked=blocked)
        return blocked

    def _notice(self, *, blocked: bool) -> None:
        if blocked and not self._blocked:
            log.warning("the broker takes no messages: it has raised an alarm (memory or disk)")
        elif self._blocked and not blocked:
            log.info("the broker takes messages again")
        self._blocked = blocked

    async def _drop(self, connection: AbstractConnection) -> None:
        # Several publishes of one window may fail together; only the first drops the connection they share.
        if self._connection is connection:
            self._connection = None
            await close(connection)
