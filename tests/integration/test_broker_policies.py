"""The ways to give a broker the policies of `deploy/rabbitmq.json`, on a broker that has none."""

import asyncio
import os
import sys
from typing import Any

import aio_pika

from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.topology import DEAD_LETTER_QUEUE, DELIVERY_LIMIT, WORK_QUEUES
from deploy import policies
from tests.conftest import PrivateRabbitMq


async def test_policies_come_with_a_private_broker_and_by_either_command(private_rabbitmq: PrivateRabbitMq) -> None:
    server = await private_rabbitmq()
    given = await server.control("list_policies")
    for name in ("aijobs-work", "aijobs-dead"):
        assert name in given
        await server.control("clear_policy", name)

    await server.control("import_definitions", str(policies.DEFINITIONS))
    assert await server.control("list_policies") == given

    for name in ("aijobs-work", "aijobs-dead"):
        await server.control("clear_policy", name)
    address = server.address
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, policies.__file__, f"{address.host}:{address.management_port}"),
        env=os.environ | {"RABBITMQ_USER": address.user, "RABBITMQ_PASSWORD": address.password},
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await program.wait() == 0
    assert await server.control("list_policies") == given

    publisher = RabbitMqBroker([address.url()]).publisher()
    await publisher.connect()
    await publisher.close()
    queues = (await server.control("list_queues", "name", "policy")).splitlines()
    assert {tuple(line.split()) for line in queues} >= {
        *((queue, "aijobs-work") for queue in WORK_QUEUES),
        (DEAD_LETTER_QUEUE, "aijobs-dead"),
    }


async def test_a_message_that_is_given_back_too_often_by_anybody_ends_among_the_dead_once(rabbitmq_url: str) -> None:
    """The broker counts, also what a consumer of another make gives back; a second dead letter would be a double."""
    publisher = RabbitMqBroker([rabbitmq_url]).publisher()
    await publisher.connect()
    async with asyncio.timeout(60), await aio_pika.connect(rabbitmq_url) as other:
        channel = await other.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"hopeless", message_id="m"), WORK_QUEUES[0])
        queue = await channel.get_queue(WORK_QUEUES[0])
        deliveries = 0
        async with queue.iterator() as messages:
            async for message in messages:
                deliveries += 1
                await message.reject(requeue=True)
                if deliveries == DELIVERY_LIMIT + 1:
                    break
        letter = None
        dead = await channel.get_queue(DEAD_LETTER_QUEUE)
        while letter is None:
            letter = await dead.get(fail=False)
        assert (letter.message_id, letter.body) == ("m", b"hopeless")
        deaths: Any = letter.headers["x-death"]
        assert [(death["reason"], death["count"]) for death in deaths] == [("delivery_limit", 1)]
        assert await dead.get(fail=False) is None
        assert await queue.get(fail=False) is None
    await publisher.close()
