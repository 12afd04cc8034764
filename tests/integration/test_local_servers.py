"""The private servers that tests and `make up` run on."""

import asyncio
import sys
from pathlib import Path

import aio_pika
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from deploy.local.database import UnreachableError
from tests.leftovers import processes_about, until_gone

ROOT = Path(__file__).resolve().parents[2]


async def run_sql(url: str, statement: str) -> list[tuple[object, ...]]:
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            result = await connection.execute(text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []
    finally:
        await engine.dispose()


async def publish(url: str, queue: str, body: bytes) -> None:
    connection = await aio_pika.connect(url, timeout=5)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, queue, timeout=5)


async def consume(url: str, queue: str) -> bytes:
    connection = await aio_pika.connect(url, timeout=5)
    async with connection:
        channel = await connection.channel()
        declared = await channel.get_queue(queue)
        async with asyncio.timeout(10), declared.iterator() as messages:
            async for message in messages:
                await message.ack()
                return message.body
    raise AssertionError("the iterator ended")


async def test_shared_mariadb_gives_an_empty_database(mariadb_url):
    assert await run_sql(mariadb_url, "SHOW TABLES") == []
    await run_sql(mariadb_url, "CREATE TABLE a (id INT PRIMARY KEY)")
    assert await run_sql(mariadb_url, "SHOW TABLES") == [("a",)]


@pytest.mark.parametrize("turn", [1, 2])
async def test_tests_do_not_see_each_others_tables(mariadb_url, turn):
    await run_sql(mariadb_url, "CREATE TABLE mine (id INT PRIMARY KEY)")


@pytest.mark.parametrize("turn", [1, 2])
async def test_shared_rabbitmq_gives_an_empty_virtual_host(rabbitmq_url, turn):
    connection = await aio_pika.connect(rabbitmq_url)
    async with connection:
        channel = await connection.channel()
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await channel.get_queue("work")
    await publish(rabbitmq_url, "work", b"one")
    assert await consume(rabbitmq_url, "work") == b"one"


async def test_mariadb_keeps_committed_rows_through_kill_and_restart(private_mariadb):
    server = await private_mariadb()
    url = await server.create_database("kept")
    await run_sql(url, "CREATE TABLE a (id INT PRIMARY KEY)")
    await run_sql(url, "INSERT INTO a VALUES (7)")
    await server.kill()
    with pytest.raises(UnreachableError):
        await server.address.ping()
    await server.restart()
    assert await run_sql(url, "SELECT id FROM a") == [(7,)]


async def test_frozen_mariadb_answers_nothing_until_thawed(private_mariadb):
    server = await private_mariadb()
    url = await server.create_database("kept")
    server.freeze()
    query = asyncio.create_task(run_sql(url, "SELECT 1"))
    done, _ = await asyncio.wait({query}, timeout=0.3)
    assert not done
    server.thaw()
    async with asyncio.timeout(10):
        assert await query == [(1,)]


async def test_mariadb_flushes_each_commit_unless_told_otherwise(private_mariadb):
    server = await private_mariadb()
    url = await server.create_database("settings")
    assert await run_sql(url, "SELECT @@innodb_flush_log_at_trx_commit") == [(1,)]


async def test_rabbitmq_keeps_confirmed_messages_through_kill_and_restart_and_counts_them(private_rabbitmq):
    server = await private_rabbitmq()
    url = await server.create_vhost("kept")
    await publish(url, "work", b"one")
    assert (await server.address.depth("work", vhost="kept")).ready == 1
    await server.until_kept("work", vhost="kept")
    await server.kill()
    with pytest.raises(UnreachableError):
        await server.address.ping()
    await server.restart()
    assert await consume(url, "work") == b"one"
    assert (await server.address.depth("work", vhost="kept")).ready == 0
    # The same node, to save the start of another: frozen it answers nothing, thawed it does.
    server.freeze()
    publishing = asyncio.create_task(publish(url, "work", b"two"))
    done, _ = await asyncio.wait({publishing}, timeout=0.3)
    assert not done
    server.thaw()
    async with asyncio.timeout(10):
        await publishing
    await server.delete_vhost("kept")
    with pytest.raises(UnreachableError):
        await server.address.depth("work", vhost="kept")


OWNER = """
import asyncio, sys
from pathlib import Path
from deploy.local.lifeline import Lifeline
from deploy.local.mariadb import MariaDbBinaries, MariaDbServer
from deploy.local.rabbitmq import RabbitMqBinaries, RabbitMqServer

async def own(folder):
    lifeline = Lifeline(folder / "lifeline")
    database = MariaDbServer(folder / "mariadb", lifeline=lifeline, binaries=MariaDbBinaries.find())
    broker = RabbitMqServer(folder / "rabbitmq", lifeline=lifeline, binaries=RabbitMqBinaries.find())
    await asyncio.gather(database.start(), broker.start())
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(own(Path(sys.argv[1])))
"""


async def test_nothing_is_left_running_when_the_owner_is_killed(tmp_path):
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        running = "\n".join(processes_about(tmp_path))
        assert "mariadbd" in running
        assert "beam" in running
        assert "epmd" in running
    finally:
        owner.kill()
        await owner.wait()
    await until_gone(tmp_path)
