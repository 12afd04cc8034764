"""Engines for tests: one for a module, or one that a test may spoil."""

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.guarded import tail
from deploy.local.lifeline import Lifeline
from deploy.local.machine import LocalMachine
from deploy.local.provision import BrokerServer, own_broker
from tests.acceptance.engine import Engine

MakeEngine = Callable[..., Awaitable[Engine]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the services logged during a test that failed."""
    report = yield
    engine = getattr(item, "funcargs", {}).get("engine")
    if report.when == "call" and report.failed and isinstance(engine, Engine):
        for process in engine.processes:
            report.sections.append((f"log of {process.name}", tail(process.log, lines=60)))
    return report


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make_engine(
    mariadb_address: DatabaseAddress, rabbitmq_address: BrokerAddress, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MakeEngine]:
    """Make an engine on a database and a virtual host of its own, not started; takes environment variables.

    With `broker_url` it uses that broker instead.
    """
    names: list[str] = []
    engines: list[Engine] = []

    async def make(*, broker_url: str = "", **environment: str) -> Engine:
        names.append(name := f"test_{uuid4().hex}")
        engine = Engine(
            tmp_path_factory.mktemp("engine"),
            database_url=await mariadb_address.create_database(name),
            broker_url=broker_url or await rabbitmq_address.create_vhost(name),
            environment=environment,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.end()
    for name in names:
        await mariadb_address.drop_database(name)
        await rabbitmq_address.delete_vhost(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrokerServer]:
    """A broker that the tests of this module may do anything to."""
    folder = tmp_path_factory.mktemp("broker")
    lifeline = Lifeline(folder / "lifeline").hold()
    server = own_broker(folder / "rabbitmq", lifeline=lifeline, machine=LocalMachine())
    await server.start()
    yield server
    await server.discard()
    lifeline.release()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    """The engine of a module, with the variables in its `ENVIRONMENT`."""
    engine = await make_engine(**getattr(request.module, "ENVIRONMENT", {}))
    await engine.start()
    return engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: Engine) -> AsyncIterator[Engine]:
    """The engine of the module; whatever a test did to its processes is put right afterwards."""
    yield shared_engine
    await shared_engine.heal()
