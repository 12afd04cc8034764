"""RabbitMQ behind the broker port."""

from collections.abc import Sequence
from datetime import timedelta

from aijobs.broker.rabbitmq_connection import Connector
from aijobs.broker.rabbitmq_consumer import CHECK_INTERVAL, RabbitMqConsumer
from aijobs.broker.rabbitmq_publisher import RabbitMqPublisher


class RabbitMqBroker:
    """Implements `aijobs.broker.port.Broker`.

    Args:
        urls: `amqp://user:password@host:port/vhost`, one per node; tried in order.
        check_interval: how often a consumer checks that the broker answers.

    """

    def __init__(self, urls: Sequence[str], *, check_interval: timedelta = CHECK_INTERVAL) -> None:
        self._connector = Connector(urls)
        self._check_interval = check_interval

    def publisher(self) -> RabbitMqPublisher:
        """Return a publisher, not yet connected."""
        return RabbitMqPublisher(self._connector)

    def consumer(self, queue: str, prefetch: int) -> RabbitMqConsumer:
        """Return a consumer, not yet connected."""
        return RabbitMqConsumer(self._connector, queue, prefetch, check_interval=self._check_interval)
