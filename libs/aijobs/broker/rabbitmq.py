"""RabbitMQ behind the broker port."""

from collections.abc import Sequence

from aijobs.broker.rabbitmq_connection import Connector
from aijobs.broker.rabbitmq_consumer import RabbitMqConsumer
from aijobs.broker.rabbitmq_publisher import RabbitMqPublisher


class RabbitMqBroker:
    """Implements `aijobs.broker.port.Broker`.

    Args:
        urls: `amqp://user:password@host:port/vhost`, one per node; tried in order.

    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._connector = Connector(urls)

    def publisher(self) -> RabbitMqPublisher:
        """Return a publisher, not yet connected."""
        return RabbitMqPublisher(self._connector)

    def consumer(self, queue: str, prefetch: int) -> RabbitMqConsumer:
        """Return a consumer, not yet connected."""
        return RabbitMqConsumer(self._connector, queue, prefetch)
