"""What dispatcher and executor need of a broker."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from aijobs.service import CannotRun

#: A message holds a few ids. Larger bodies are refused by every implementation.
LARGEST_BODY = 128 * 1024


class BrokerUnavailable(Exception):
    """The broker cannot be reached, is blocked, or its answer was lost: whether it has the message is unknown.

    Nobody's fault: publish again with the same message id once it is back (OB-4).
    """


class QueueMissing(BrokerUnavailable):
    """The work queue that a message is for does not exist; the next connect declares it again (OB-4)."""


class MessageRefused(Exception):
    """The broker will never take this message: the message's own fault (OB-4)."""


class TopologyConflict(CannotRun):
    """A queue or an exchange exists with other arguments. The message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to publish.

    Attributes:
        queue: the work queue that it is for; None: an event for whoever subscribed.
        topic: routing key of an event; unused for work queues.
        message_id: id of the outbox event; the same in every repeat.
        correlation_id: the job id.
        trace_context: goes along as the header `traceparent`, if it is not empty (OB-9).

    """

    queue: str | None
    topic: str
    message_id: str
    correlation_id: str
    body: bytes
    trace_context: str = ""


class Publisher(Protocol):
    """Publishes messages and waits for the broker to confirm each of them."""

    async def connect(self) -> None:
        """Connect and declare the topology, unless that is done.

        Raises:
            BrokerUnavailable: it cannot be reached.
            TopologyConflict: it holds a queue or an exchange with other arguments.

        """
        ...

    async def publish(self, message: Message, within: timedelta) -> None:
        """Publish a message and return once the broker has confirmed that it is stored.

        Raises:
            BrokerUnavailable: not confirmed in time; the outcome is unknown.
            QueueMissing: there is no such work queue.
            MessageRefused: the broker does not take this message.

        """
        ...

    async def depths(self, within: timedelta) -> Mapping[str, int]:
        """Return how many messages wait in each work queue at this moment; those that a consumer holds do not count.

        Raises:
            BrokerUnavailable: no answer in time, or not connected.
            QueueMissing: one of the queues does not exist; the next `connect` declares it again.

        """
        ...

    async def close(self) -> None:
        """Close the connection; the next `connect` opens a new one."""
        ...


class Delivery(Protocol):
    """A message in the hands of a consumer. Until it is settled it counts against the prefetch.

    Settling after the connection broke does nothing: the broker has already given the message to somebody else.
    """

    @property
    def body(self) -> bytes:
        """The message's body."""
        ...

    @property
    def message_id(self) -> str:
        """The message's id, empty if it has none."""
        ...

    @property
    def trace_context(self) -> str:
        """The message's traceparent, empty if it has none; not checked."""
        ...

    async def ack(self) -> None:
        """Done with it."""
        ...

    async def requeue(self) -> None:
        """Give it back for later, here or elsewhere; RabbitMQ before 4.3 counts that like `reject`."""
        ...

    async def reject(self) -> None:
        """Give it back for another try, having failed with it; put aside when that happens too often (QU-1)."""
        ...

    async def dead_letter(self) -> None:
        """Put it aside for ever: it is poison."""
        ...


class Consumer(Protocol):
    """Receives the messages of one work queue. Leaving the context gives unsettled ones back."""

    async def __aenter__(self) -> Self:
        """Connect, declare the topology and start to consume.

        Raises:
            BrokerUnavailable: it cannot be reached.
            TopologyConflict: it holds a queue or an exchange with other arguments.

        """
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop consuming and close the connection. Raises nothing."""
        ...

    async def stop(self) -> None:
        """Receive no more; what was yielded can still be settled. `deliveries` then ends. Raises nothing."""
        ...

    async def widen(self, by: int) -> None:
        """Hold up to `by` more unsettled messages.

        Raises:
            BrokerUnavailable: the broker did not confirm it.

        """
        ...

    def deliveries(self) -> AsyncIterator[Delivery]:
        """Yield messages, at most `prefetch` unsettled ones at a time, until stopped.

        Raises:
            BrokerUnavailable: the connection broke, the broker cancelled the consumer, or it does not answer.

        """
        ...


class Broker(Protocol):
    """Makes publishers and consumers; each has its own connection."""

    def publisher(self) -> Publisher:
        """Return a publisher, not yet connected."""
        ...

    def consumer(self, queue: str, prefetch: int) -> Consumer:
        """Return a consumer of a work queue that holds at most `prefetch` unsettled messages; 0: none until widened."""
        ...
