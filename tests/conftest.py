"""What all tests share: the `--long` option and the servers."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.lifeline import Lifeline
from deploy.local.machine import LocalMachine
from deploy.local.provision import BrokerServer, DatabaseServer, own_broker, own_database
from deploy.local.shared import SharedServers, shared_broker, shared_database

SERVERS = pytest.StashKey[SharedServers]()
FOLDER = pytest.StashKey[Path]()

PrivateMariaDb = Callable[..., Awaitable[DatabaseServer]]
PrivateRabbitMq = Callable[[], Awaitable[BrokerServer]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too")


def pytest_configure(config: pytest.Config) -> None:
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None:
        # The only process, or the controller of the workers.
        config.stash[SERVERS] = SharedServers()
        config.stash[FOLDER] = config.stash[SERVERS].folder
    else:
        config.stash[FOLDER] = Path(workerinput["aijobs_servers"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a worker of pytest-xdist where the servers are."""
    node.workerinput["aijobs_servers"] = str(node.config.stash[FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    if (servers := config.stash.get(SERVERS, None)) is not None:
        servers.end()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


@pytest.fixture(scope="session")
def mariadb_address(pytestconfig: pytest.Config) -> DatabaseAddress:
    """The database server of this test run, one for all workers."""
    return shared_database(pytestconfig.stash[FOLDER], os.environ)


@pytest.fixture(scope="session")
def rabbitmq_address(pytestconfig: pytest.Config) -> BrokerAddress:
    """The broker of this test run, one for all workers."""
    return shared_broker(pytestconfig.stash[FOLDER], os.environ)


@pytest.fixture
async def mariadb_url(mariadb_address: DatabaseAddress) -> AsyncIterator[str]:
    """A fresh empty database, as a SQLAlchemy URL."""
    name = f"test_{uuid4().hex}"
    yield await mariadb_address.create_database(name)
    await mariadb_address.drop_database(name)


@pytest.fixture
async def rabbitmq_url(rabbitmq_address: BrokerAddress) -> AsyncIterator[str]:
    """A fresh empty virtual host, as an AMQP URL."""
    name = f"test_{uuid4().hex}"
    yield await rabbitmq_address.create_vhost(name)
    await rabbitmq_address.delete_vhost(name)


@pytest.fixture
def lifeline(tmp_path: Path) -> Iterator[Lifeline]:
    """What a test's own processes hang on: they end with the test, and with whoever kills it."""
    line = Lifeline(tmp_path / "lifeline").hold()
    yield line
    line.release()


@pytest.fixture
async def private_mariadb(
    tmp_path: Path, lifeline: Lifeline, pytestconfig: pytest.Config
) -> AsyncIterator[PrivateMariaDb]:
    """Start a database server that the test may kill; takes `flush_log_at_commit`."""
    servers: list[DatabaseServer] = []

    async def start(*, flush_log_at_commit: int = 1) -> DatabaseServer:
        server = own_database(
            tmp_path / f"mariadb-{len(servers)}",
            lifeline=lifeline,
            machine=LocalMachine(),
            flush_log_at_commit=flush_log_at_commit,
            template=pytestconfig.stash[FOLDER] / "mariadb-template",
        )
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.discard()


@pytest.fixture
async def private_rabbitmq(tmp_path: Path, lifeline: Lifeline) -> AsyncIterator[PrivateRabbitMq]:
    """Start a broker that the test may kill."""
    servers: list[BrokerServer] = []

    async def start() -> BrokerServer:
        server = own_broker(tmp_path / f"rabbitmq-{len(servers)}", lifeline=lifeline, machine=LocalMachine())
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.discard()
