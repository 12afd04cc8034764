"""Services that are started wrongly, or into a world that is not ready: one reason in the log, and the right status."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
import pytest_asyncio

from aijobs.rpc.roles import Role
from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.processes import ServiceProcess
from services.jobs.store.tables import outbox_events
from tests.acceptance.command import Running, aijobs
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.gate import Gate

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("jobs", "dispatcher", "executor")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine) -> Engine:
    engine = await make_engine()
    await engine.start()
    return engine


@pytest_asyncio.fixture(loop_scope="module")
async def empty_database(mariadb_address: DatabaseAddress) -> AsyncIterator[str]:
    name = f"test_{uuid4().hex}"
    yield await mariadb_address.create_database(name)
    await mariadb_address.drop_database(name)


async def ended(process: ServiceProcess) -> tuple[int, list[dict[str, Any]]]:
    """Wait for the end of a service; returns its status and the lines of its log, each of them JSON."""
    async with asyncio.timeout(20):
        status = await process.wait()
    return status, [json.loads(line) for line in process.log.read_text().splitlines()]


def the_reason(events: list[dict[str, Any]]) -> str:
    """Return what the last line says, having checked that it is an error without a traceback."""
    assert not any("exception" in event for event in events)
    assert (events[-1]["level"], events[-1]["event"]) == ("error", "the service cannot run")
    return str(events[-1]["why"])


async def test_jobs_waits_for_its_database_and_says_so_once(engine, empty_database):
    gate = Gate(empty_database)
    late = engine.process("jobs", log="late", AIJOBS_DATABASE_URL=gate.url)
    await late.launch()
    try:
        await engine.until_logged(late, "waiting for the database")
        assert await late.health() == "NOT_SERVING"
        # It has a look each second: by now it would have said so again.
        ended = await aijobs(
            "jobs", "get", "x", environment={"AIJOBS_ADDRESS": late.address, "AIJOBS_TOKEN": engine.token(Role.BACKEND)}
        )
        assert ended.status == 5
        assert "database" in ended.err
        assert (await aijobs("migrate", environment={"AIJOBS_DATABASE_URL": empty_database})).status == 0
        assert len(lines_with(late.log, "waiting for the database")) == 1
        await gate.open()
        await late.ready(within=timedelta(seconds=10))
        assert lines_with(late.log, "the database answers")
        assert lines_with(late.log, "exception") == []
    finally:
        await late.kill()
        await gate.shut()


async def test_jobs_refuses_a_database_without_migrations(engine, empty_database):
    process = engine.process("jobs", log="unmigrated", AIJOBS_DATABASE_URL=empty_database)
    await process.launch()
    status, events = await ended(process)
    assert status == 1
    assert "aijobs migrate" in the_reason(events)


@pytest.mark.parametrize("name", NAMES)
async def test_an_address_that_is_taken(engine, name):
    process = engine.process(name, log=f"{name}-twice", listen=engine.jobs.address)
    await process.launch()
    status, events = await ended(process)
    assert status == 1
    assert the_reason(events) == f"cannot listen on {engine.jobs.address}: Address already in use"
    # The one that was there first has noticed nothing.
    await engine.require_run_once(await engine.create())


@pytest_asyncio.fixture(loop_scope="module")
async def foreign_queues(rabbitmq_address: BrokerAddress) -> AsyncIterator[str]:
    """A virtual host in which somebody has declared our queue in another way."""
    name = f"test_{uuid4().hex}"
    url = await rabbitmq_address.create_vhost(name)
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("ai-interactive", durable=True, arguments={"x-queue-type": "classic"})
    yield url
    await rabbitmq_address.delete_vhost(name)


@pytest.mark.parametrize("name", ["dispatcher", "executor"])
async def test_a_broker_with_other_queues_is_refused(engine, foreign_queues, name):
    process = engine.process(name, log=f"{name}-foreign", AIJOBS_BROKER_URL=foreign_queues)
    await process.launch()
    status, events = await ended(process)
    assert status == 1
    assert "delete it there" in the_reason(events)
    assert "ai-interactive" in the_reason(events)


@pytest.mark.parametrize("name", ["dispatcher", "executor"])
async def test_without_a_broker_a_service_waits_and_is_not_ready(engine, name):
    gate = Gate(engine.connections.broker_url)
    process = engine.process(name, log=f"{name}-waiting", AIJOBS_BROKER_URL=gate.url)
    await process.launch()
    try:
        await engine.until_logged(process, "cannot be reached" if name == "dispatcher" else "not consuming")
        assert await process.health() == "NOT_SERVING"
        await gate.open()
        await process.ready(within=timedelta(seconds=10))
    finally:
        await process.kill()
        await gate.shut()


async def test_without_a_broker_jobs_are_taken_and_wait(engine):
    gate = Gate(engine.connections.broker_url)
    await engine.dispatcher.kill()
    cut_off = engine.process("dispatcher", log="cut-off", AIJOBS_BROKER_URL=gate.url)
    await cut_off.launch()
    try:
        job_id = await engine.create()
        await engine.until_logged(cut_off, "not relaying")
        (event,) = await engine.read(outbox_events, aggregate_id=job_id)
        assert (event["status"], event["attempt_count"]) == ("pending", 0)
        await gate.open()
        await engine.require_run_once(job_id)
    finally:
        await cut_off.kill()
        await gate.shut()


@pytest.mark.parametrize("name", ["dispatcher", "executor"])
async def test_a_token_that_does_not_hold_is_named_in_the_log(engine, name):
    process = engine.process(name, log=f"{name}-forged", AIJOBS_TOKEN=engine.token(Role.USER))
    await process.launch()
    try:
        await engine.until_logged(process, f"needs the role {name}")
        assert lines_with(process.log, engine.token(Role.USER).split(".")[1]) == []
    finally:
        await process.kill()


BAD_SETTINGS = [
    ("jobs", {"AIJOBS_DATABASE_URL": ""}, "AIJOBS_DATABASE_URL: required, but not set"),
    ("jobs", {"AIJOBS_DATABASE_URL": "postgresql://u:hush@h/x"}, "AIJOBS_DATABASE_URL: no support for postgresql"),
    ("jobs", {"AIJOBS_LISTEN": "0.0.0.0:50051", "AIJOBS_TOKEN_SECRET": ""}, "AIJOBS_TOKEN_SECRET"),
    ("jobs", {"AIJOBS_TOKEN_SECRET": "short-hush"}, "AIJOBS_TOKEN_SECRET: "),
    ("jobs", {"AIJOBS_LEASE_SECONDS": "soon"}, "AIJOBS_LEASE_SECONDS: Input should be a number of seconds"),
    ("dispatcher", {"AIJOBS_BROKER_URL": "http://u:hush@h/"}, "AIJOBS_BROKER_URL: address 1 is not an AMQP URL"),
    ("dispatcher", {"AIJOBS_LISTEN": "nonsense"}, "AIJOBS_LISTEN: bad address 'nonsense': expected host:port"),
    ("executor", {"AIJOBS_PROVIDER": "magic"}, "AIJOBS_PROVIDER: Input should be 'offline' or 'openai'; got 'magic'"),
    ("executor", {"AIJOBS_PROVIDER": "openai"}, "AIJOBS_MODEL_PRIMARY: name a model"),
]


@pytest.mark.parametrize(("name", "wrong", "said"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
async def test_a_bad_setting_is_named_and_nothing_starts(name: str, wrong: dict[str, str], said: str) -> None:
    right = {"AIJOBS_DATABASE_URL": "sqlite+aiosqlite:///x", "AIJOBS_BROKER_URL": "amqp://127.0.0.1/"}
    process = await (await Running.start("-m", f"services.{name}", environment=right | wrong)).ended()
    assert (process.status, process.out) == (2, "")
    (line,) = process.err.splitlines()
    assert said in line
    assert "hush" not in line


async def test_a_migration_that_cannot_reach_its_database_says_so() -> None:
    ended = await aijobs("migrate", environment={"AIJOBS_DATABASE_URL": "mysql+aiomysql://u:hush@127.0.0.1:1/x"})
    assert (ended.status, ended.out) == (5, "")
    assert "database" in ended.err
    assert "hush" not in ended.err
