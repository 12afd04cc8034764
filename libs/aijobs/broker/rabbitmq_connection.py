"""Connections to RabbitMQ, with the topology declared.

Plain connections and no library-made reconnecting: aio-pika's robust connections stay on a dead address, and a channel
that was opened during a leader election refuses every message for ever. Here whoever meets a fault drops the whole
connection, and the next one tries every address again.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import aio_pika
import structlog
from aio_pika.abc import AbstractConnection
from aio_pika.connection import make_url
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError, ChannelPreconditionFailed

from aijobs.broker.port import BrokerUnavailable, TopologyConflict
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
#: The broker gives up a connection that is silent for twice as long, and others get what it held.
HEARTBEAT_SECONDS = 20
#: Everything that means "not now" or "no idea".
FAULTS = (AMQPError, OSError, asyncio.TimeoutError, ChannelInvalidStateError, RuntimeError)
log = structlog.get_logger()


class Connector:
    """Opens connections.

    Args:
        urls: `amqp://user:password@host:port/vhost`, one per node; tried in order.

    """

    def __init__(self, urls: Sequence[str]) -> None:
        parsed = map(make_url, urls)
        # One that names a heartbeat means it.
        self._urls = [
            url if "heartbeat" in url.query else url.update_query(heartbeat=HEARTBEAT_SECONDS) for url in parsed
        ]

    async def open(self, name: str) -> AbstractConnection:
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
                await declare(connection)
            except TopologyConflict:
                await close(connection)
                raise
            except FAULTS as error:
                await close(connection)
                log.debug("broker node broke off", error=type(error).__name__)
                continue
            return connection
        raise BrokerUnavailable(f"the broker cannot be reached: none of {len(self._urls)} addresses answers")


async def declare(connection: AbstractConnection) -> None:
    """Declare the topology; whatever is there already stays as it is.

    Raises:
        TopologyConflict: a queue or an exchange exists with other arguments.
        Exception: one of FAULTS.

    """
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


def is_open(connection: AbstractConnection) -> bool:
    """Tell whether a connection is there, as far as this side knows: lost ones are not `is_closed` to the library."""
    return connection.connected.is_set() and not connection.is_closed


async def is_blocked(connection: AbstractConnection) -> bool:
    """Tell whether the broker has said that it reads nothing more from this connection (connection.blocked).

    The library tells nobody of it; but what waits until a connection is ready waits for the end of it.
    """
    if connection.transport is None:
        return False
    ready = asyncio.ensure_future(connection.transport.ready())
    # One turn of the loop, in which it ends unless there is something to wait for.
    await asyncio.sleep(0)
    return ready.cancel()


async def close(connection: AbstractConnection) -> None:
    """Close a connection, whatever state it is in. Raises nothing."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            await connection.close()
    except FAULTS as error:
        log.debug("connection not closed in order", error=type(error).__name__)
