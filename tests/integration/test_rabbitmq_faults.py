"""What happens to publishers and consumers when RabbitMQ breaks, and that they work again afterwards."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import uuid4

import aio_pika
import pytest

from aijobs.broker.port import BrokerUnavailable, Delivery, Message, TopologyConflict
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.topology import WORK_QUEUES
from deploy.local.ports import free_port
from tests.conftest import PrivateRabbitMq

QUEUE = WORK_QUEUES[0]
SOON = timedelta(seconds=10)


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(90):
        yield


def message(body: bytes = b"{}") -> Message:
    return Message(queue=QUEUE, topic="", message_id=uuid4().hex, correlation_id="job-1", body=body)


async def one(deliveries: AsyncIterator[Delivery]) -> Delivery:
    delivery = await anext(deliveries)
    await delivery.ack()
    return delivery


async def test_a_queue_deleted_under_a_consumer_is_noticed(rabbitmq_url: str) -> None:
    """The broker cancels the consumer and says so only in a frame that aio-pika does not pass on."""
    broker = RabbitMqBroker([rabbitmq_url])
    async with broker.consumer(QUEUE, 1) as consumer, await aio_pika.connect(rabbitmq_url) as operator:
        receiving = asyncio.ensure_future(anext(consumer.deliveries()))
        await (await operator.channel()).queue_delete(QUEUE)
        with pytest.raises(BrokerUnavailable):
            await receiving
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(b"again"), SOON)
    async with broker.consumer(QUEUE, 1) as consumer:
        assert (await one(consumer.deliveries())).body == b"again"
    await publisher.close()


async def test_a_queue_with_other_arguments_is_one_clear_error(rabbitmq_url: str) -> None:
    async with await aio_pika.connect(rabbitmq_url) as operator:
        await (await operator.channel()).declare_queue(QUEUE, durable=True)
    broker = RabbitMqBroker([rabbitmq_url])
    with pytest.raises(TopologyConflict, match=QUEUE):
        await broker.publisher().connect()
    with pytest.raises(TopologyConflict, match="delete it there"):
        async with broker.consumer(QUEUE, 1):
            pass


async def test_the_next_address_is_tried_when_one_does_not_answer(rabbitmq_url: str) -> None:
    broker = RabbitMqBroker([f"amqp://guest:guest@127.0.0.1:{free_port()}/", rabbitmq_url])
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(), SOON)
    await publisher.close()


async def test_nobody_answering_is_told_soon() -> None:
    with pytest.raises(BrokerUnavailable, match="none of 1"):
        await RabbitMqBroker([f"amqp://guest:guest@127.0.0.1:{free_port()}/"]).publisher().connect()


async def test_a_killed_broker_is_noticed_and_used_again_after_its_restart(private_rabbitmq: PrivateRabbitMq) -> None:
    server = await private_rabbitmq()
    vhost = "test"
    broker = RabbitMqBroker([await server.create_vhost(vhost)])
    publisher = broker.publisher()
    await publisher.connect()
    await publisher.publish(message(b"kept"), SOON)
    for queue in WORK_QUEUES:
        await server.until_kept(queue, vhost=vhost)
    async with broker.consumer(WORK_QUEUES[1], 1) as consumer:
        receiving = asyncio.ensure_future(anext(consumer.deliveries()))
        await server.kill()
        with pytest.raises(BrokerUnavailable):
            await receiving
    with pytest.raises(BrokerUnavailable):
        await publisher.publish(message(b"lost"), SOON)
    with pytest.raises(BrokerUnavailable):
        await publisher.connect()
    await server.restart()
    await publisher.connect()
    await publisher.publish(message(b"after"), SOON)
    async with broker.consumer(QUEUE, 5) as consumer:
        deliveries = consumer.deliveries()
        assert [(await one(deliveries)).body for _ in range(2)] == [b"kept", b"after"]

    # A frozen broker confirms nothing: the outcome is unknown, and the wait for it is bounded.
    server.freeze()
    with pytest.raises(BrokerUnavailable, match="how many"):
        await publisher.depths(timedelta(seconds=1))
    with pytest.raises(BrokerUnavailable, match="unknown"):
        await publisher.publish(message(b"unknown"), timedelta(seconds=1))
    server.thaw()
    await publisher.connect()
    await publisher.publish(message(b"thawed"), SOON)
    assert (await publisher.depths(SOON))[QUEUE] >= 1
    await publisher.close()
