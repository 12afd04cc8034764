"""Broker and database that come late, go away, or hang: nothing is lost, and everybody waits for them by itself."""

import itertools
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.processes import ServiceProcess
from deploy.local.provision import BrokerServer
from services.jobs.store.tables import outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.gate import Gate

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("jobs", "dispatcher", "executor")
WAITING = {
    "jobs": "waiting for the database",
    "dispatcher": "not relaying",
    "executor": "not consuming",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, own_rabbitmq: BrokerServer) -> Engine:
    engine = await make_engine(
        broker_url=own_rabbitmq.address.url(), AIJOBS_CLAIM_SECONDS="6", AIJOBS_CLAIM_RELEASE_SECONDS="0.2"
    )
    await engine.start()
    return engine


async def test_dispatcher_killed_between_claim_and_publish(engine, own_rabbitmq):
    own_rabbitmq.freeze()
    job_id = await engine.create()
    # Claimed, and the confirm cannot come.
    await engine.until_event(job_id, "processing")
    (claimed,) = await engine.read(outbox_events, aggregate_id=job_id)
    await engine.dispatcher.kill()
    own_rabbitmq.thaw()
    await engine.dispatcher.start()
    await engine.require_run_once(job_id)
    (event,) = await engine.read(outbox_events, aggregate_id=job_id, event_type="ai.job.enqueue")
    # Another claim has published it, and nobody's attempt was used up.
    assert event["claim_token"] != claimed["claim_token"]
    assert event["attempt_count"] == 0


async def test_broker_restarted_between_publish_and_consume(engine, own_rabbitmq):
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    await own_rabbitmq.until_kept("ai-interactive")
    await own_rabbitmq.restart()
    await engine.executor.start()
    await engine.require_run_once(job_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gates(mariadb_address: DatabaseAddress, rabbitmq_address: BrokerAddress) -> AsyncIterator[tuple[Gate, Gate]]:
    """Ports of a database and of a broker, shut."""
    name = f"test_{uuid4().hex}"
    database = Gate(await mariadb_address.create_database(name))
    broker = Gate(await rabbitmq_address.create_vhost(name))
    yield database, broker
    await database.shut()
    await broker.shut()
    await mariadb_address.drop_database(name)
    await rabbitmq_address.delete_vhost(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def late_servers_engine(
    gates: tuple[Gate, Gate], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """An engine whose servers come and go as the gates say; not started."""
    database, broker = gates
    engine = Engine(tmp_path_factory.mktemp("engine"), database_url=database.url, broker_url=broker.url, environment={})
    await database.open()
    await engine.migrate()
    yield engine
    await engine.end()


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="-".join)
async def test_services_start_before_their_servers_in_any_order(late_servers_engine, gates, order):
    engine, (database, broker) = late_servers_engine, gates
    await database.shut()
    await broker.shut()
    for process in engine.processes:
        process.log.write_bytes(b"")
    for name in order:
        starting: ServiceProcess = getattr(engine, name)
        await starting.launch()
        await engine.until_logged(starting, WAITING[name])
        assert await starting.health() == "NOT_SERVING"
    first, second = (database, broker) if order < tuple(reversed(order)) else (broker, database)
    await first.open()
    await second.open()
    for process in engine.processes:
        await process.ready(within=timedelta(seconds=15))
    await engine.require_run_once(await engine.create())
    for process in engine.processes:
        assert lines_with(process.log, "Traceback") == []
        await process.kill()


async def test_services_that_run_get_over_a_database_and_a_broker_that_go_away(late_servers_engine, gates):
    engine, (database, broker) = late_servers_engine, gates
    await database.open()
    await broker.open()
    await engine.start()
    await engine.require_run_once(await engine.create())
    job_id = await engine.create(sleep_ms=1000)
    await engine.changes(job_id, upto="locked")
    await broker.shut()
    await database.shut()
    await engine.until_logged(engine.dispatcher, "not relaying")
    await engine.until_logged(engine.executor, "not consuming")
    await engine.until_logged(engine.executor, "outcome not stored yet")
    await broker.open()
    await database.open()
    await engine.require_run_once(job_id)
    await engine.require_run_once(await engine.create())
    for process in engine.processes:
        assert process.pid is not None
        await process.ready(within=timedelta(seconds=15))
