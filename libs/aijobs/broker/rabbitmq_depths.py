"""Counting the messages that wait in RabbitMQ."""

import asyncio
from datetime import timedelta

from aio_pika.abc import AbstractChannel, AbstractConnection

from aijobs.broker.topology import WORK_QUEUES


class DepthReader:
    """Asks a connection's broker how deep the work queues are.

    A passive declare is answered with the count of this moment, by the queue's leader; the management API's figures
    are seconds old. (A leader that does not answer within 250 ms is counted as empty by RabbitMQ itself.)

    The channel is its own, since a declare that fails closes the channel it came on, and is kept from one reading to
    the next.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channel: AbstractChannel | None = None
        self._reading = asyncio.Lock()

    async def read(self, within: timedelta) -> dict[str, int]:
        """Count the ready messages of each work queue; to wait for another reading takes nothing of the time.

        Raises:
            aio_pika.exceptions.ChannelNotFoundEntity: there is no such queue.
            Exception: one of FAULTS.

        """
        async with self._reading, asyncio.timeout(within.total_seconds()):
            # Forgotten until all has gone well: a channel on which something failed is closed, or about to be.
            channel, self._channel = self._channel, None
            if channel is None or channel.is_closed:
                channel = await self._connection.channel()
            depths = {name: await _depth(channel, name) for name in WORK_QUEUES}
            self._channel = channel
        return depths


async def _depth(channel: AbstractChannel, name: str) -> int:
    queue = await channel.declare_queue(name, passive=True)
    return queue.declaration_result.message_count or 0
