"""A broker inside the process, for the embedded engine: the same port, nothing kept when the process ends.

What is lost then is only hints; the embedded engine's outbox sends them again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from aijobs.broker.memory_queue import WaitingQueue
from aijobs.broker.port import LARGEST_BODY, Message, MessageRefused, QueueMissing
from aijobs.broker.topology import DELIVERY_LIMIT, WORK_QUEUES


class MemoryBroker:
    """Implements `aijobs.broker.port.Broker`."""

    def __init__(self) -> None:
        self._queues = {name: WaitingQueue() for name in WORK_QUEUES}
        self._dead: list[Message] = []
        #: How often each message that waits or is held was rejected.
        self._rejections: Counter[str] = Counter()
        self._subscribers: list[asyncio.Queue[Message]] = []

    @property
    def dead_letters(self) -> list[Message]:
        """The poison messages put aside so far."""
        return list(self._dead)

    def publisher(self) -> "MemoryPublisher":
        """Return a publisher."""
        return MemoryPublisher(self)

    def consumer(self, queue: str, prefetch: int) -> "MemoryConsumer":
        """Return a consumer of a work queue."""
        return MemoryConsumer(self, queue, prefetch)

    def subscribe(self) -> asyncio.Queue[Message]:
        """Return a queue that gets every event published from now on."""
        subscriber: asyncio.Queue[Message] = asyncio.Queue()
        self._subscribers.append(subscriber)
        return subscriber

    def delete_queue(self, name: str) -> None:
        """Forget a work queue and its messages, as an operator might."""
        self._queues.pop(name, None)

    def declare(self) -> None:
        """Create the work queues that are missing."""
        for name in WORK_QUEUES:
            self._queues.setdefault(name, WaitingQueue())

    async def take(self, message: Message) -> None:
        """Store a message.

        Raises:
            QueueMissing: there is no such work queue.

        """
        if message.queue is None:
            for subscriber in self._subscribers:
                subscriber.put_nowait(message)
            return
        await self.queue(message.queue).put(message)

    def queue(self, name: str) -> WaitingQueue:
        """Return a work queue.

        Raises:
            QueueMissing: there is none of this name.

        """
        if name not in self._queues:
            raise QueueMissing(f"no queue {name}")
        return self._queues[name]

    def bury(self, message: Message) -> None:
        """Put a poison message aside."""
        self.forget(message)
        self._dead.append(message)

    def reject(self, message: Message) -> bool:
        """Count a rejection; False if it was one too many."""
        self._rejections[message.message_id] += 1
        return self._rejections[message.message_id] <= DELIVERY_LIMIT

    def forget(self, message: Message) -> None:
        """Count no longer."""
        self._rejections.pop(message.message_id, None)


class MemoryPublisher:
    """Implements `aijobs.broker.port.Publisher`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def connect(self) -> None:
        """Declare the topology."""
        self._broker.declare()

    async def publish(self, message: Message, within: timedelta) -> None:
        """Store a message."""
        del within
        if len(message.body) > LARGEST_BODY:
            raise MessageRefused(f"{len(message.body)} bytes; at most {LARGEST_BODY}")
        await self._broker.take(message)

    async def depths(self, within: timedelta) -> Mapping[str, int]:
        """Count the waiting messages."""
        del within
        return {name: len(self._broker.queue(name).waiting) for name in WORK_QUEUES}

    async def close(self) -> None:
        """Do nothing: there is no connection."""


@dataclass(slots=True, eq=False)
class MemoryDelivery:
    """Implements `aijobs.broker.port.Delivery`."""

    message: Message
    consumer: "MemoryConsumer"

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self.message.body

    @property
    def message_id(self) -> str:
        """The message's id."""
        return self.message.message_id

    @property
    def trace_context(self) -> str:
        """The message's traceparent."""
        return self.message.trace_context

    async def ack(self) -> None:
        """Done with it."""
        if self.consumer.settle(self):
            self.consumer.broker.forget(self.message)

    async def requeue(self) -> None:
        """Give it back."""
        if self.consumer.settle(self):
            await self.consumer.give_back(self.message)

    async def reject(self) -> None:
        """Give it back, or put it aside if that happened too often."""
        if not self.consumer.settle(self):
            return
        if self.consumer.broker.reject(self.message):
            await self.consumer.give_back(self.message)
        else:
            self.consumer.broker.bury(self.message)

    async def dead_letter(self) -> None:
        """Put it aside."""
        if self.consumer.settle(self):
            self.consumer.broker.bury(self.message)


class MemoryConsumer:
    """Implements `aijobs.broker.port.Consumer`."""

    def __init__(self, broker: MemoryBroker, queue: str, prefetch: int) -> None:
        self.broker = broker
        self._name = queue
        self._free = asyncio.Semaphore(prefetch)
        self._unsettled: set[MemoryDelivery] = set()
        self._stopped = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Declare the topology."""
        self.broker.declare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give unsettled messages back."""
        unsettled, self._unsettled = self._unsettled, set()
        for delivery in unsettled:
            await self.give_back(delivery.message)

    async def stop(self) -> None:
        """Receive no more."""
        self._stopped.set()

    async def widen(self, by: int) -> None:
        """Make room for more."""
        for _ in range(by):
            self._free.release()

    async def deliveries(self) -> AsyncIterator[MemoryDelivery]:
        """Yield messages, at most `prefetch` unsettled ones at a time, until stopped."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            while True:
                receiving = asyncio.ensure_future(self._receive())
                try:
                    await asyncio.wait({receiving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not receiving.done():
                        receiving.cancel()
                if stopped.done():
                    await self._drop(receiving)
                    return
                yield receiving.result()
        finally:
            stopped.cancel()

    async def _receive(self) -> MemoryDelivery:
        await self._free.acquire()
        try:
            message = await self.broker.queue(self._name).get()
        except BaseException:  # raised on; a cancelled wait must give its place back
            self._free.release()
            raise
        delivery = MemoryDelivery(message, self)
        self._unsettled.add(delivery)
        return delivery

    @staticmethod
    async def _drop(receiving: asyncio.Future[MemoryDelivery]) -> None:
        """Give back a message that arrived while the consumer was being stopped."""
        with contextlib.suppress(asyncio.CancelledError):
            await (await receiving).requeue()

    def settle(self, delivery: MemoryDelivery) -> bool:
        """Free the place of a delivery; False if that was done before."""
        if delivery not in self._unsettled:
            return False
        self._unsettled.remove(delivery)
        self._free.release()
        return True

    async def give_back(self, message: Message) -> None:
        """Put a message back to the head of its queue."""
        await self.broker.queue(self._name).put(message, first=True)
