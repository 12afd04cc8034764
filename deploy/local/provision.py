"""Where a database server and a broker come from, first that applies.

1. an address in the environment;
2. a Docker engine that answers;
3. the server's programs on this machine, run as a private instance;
4. on Debian as root, the same after installing them;
5. an error that says what to do. Never a silent skip.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, assert_never

from deploy.local.broker import MANAGEMENT_PORT, BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.lifeline import Lifeline
from deploy.local.mariadb import MariaDbBinaries, MariaDbServer
from deploy.local.rabbitmq import RabbitMqBinaries, RabbitMqServer

TEST_DATABASE_URL = "AIJOBS_TEST_DATABASE_URL"
TEST_BROKER_URL = "AIJOBS_TEST_BROKER_URL"
#: Where the management API of the broker in AIJOBS_TEST_BROKER_URL listens, if not on 15672.
TEST_BROKER_MANAGEMENT_PORT = "AIJOBS_TEST_BROKER_MANAGEMENT_PORT"


class Kind(StrEnum):
    """What is wanted."""

    DATABASE = "database"
    BROKER = "broker"


class Source(StrEnum):
    """Where it comes from."""

    ADDRESS = "address"
    DOCKER = "docker"
    BINARIES = "binaries"
    PACKAGES = "packages"


#: Debian's packages with the programs. mariadb-server-core has no service at all.
PACKAGES: Mapping[Kind, tuple[str, ...]] = {
    Kind.DATABASE: ("mariadb-server-core", "mariadb-client-core"),
    Kind.BROKER: ("rabbitmq-server",),
}
_NAMES = {Kind.DATABASE: "MariaDB or MySQL", Kind.BROKER: "RabbitMQ"}
_PROGRAMS = {Kind.DATABASE: "mariadbd and mariadb-install-db", Kind.BROKER: "rabbitmq-server and epmd"}
_EXAMPLES = {Kind.DATABASE: "mysql+aiomysql://user:password@host:3306", Kind.BROKER: "amqp://user:password@host:5672"}


class NoServerError(Exception):
    """There is no way to get a server here; the message says what to do."""


class Machine(Protocol):
    """What provisioning asks of the machine (`LocalMachine`)."""

    def docker_answers(self) -> bool:
        """Tell whether there is a Docker engine."""

    def mariadb(self) -> MariaDbBinaries | None:
        """Return the programs of MariaDB."""

    def rabbitmq(self) -> RabbitMqBinaries | None:
        """Return the programs of RabbitMQ."""

    def can_install(self) -> bool:
        """Tell whether packages may be installed."""


class InstallingMachine(Machine, Protocol):
    """A machine that we may change."""

    def install(self, packages: Sequence[str]) -> None:
        """Install Debian packages."""


class Server(Protocol):
    """A server that we own and may do anything to."""

    async def start(self) -> None:
        """Start it."""

    async def stop(self) -> None:
        """Stop it in an orderly way."""

    async def kill(self) -> None:
        """End it by SIGKILL."""

    async def discard(self) -> None:
        """End it at once and for good."""

    def freeze(self) -> None:
        """Let it hang."""

    def thaw(self) -> None:
        """Let it go on."""

    async def restart(self) -> None:
        """Stop and start it on the same address and data."""


class DatabaseServer(Server, Protocol):
    """A database server that we own."""

    @property
    def address(self) -> DatabaseAddress:
        """Where it is."""

    async def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""


class BrokerServer(Server, Protocol):
    """A broker that we own."""

    @property
    def address(self) -> BrokerAddress:
        """Where it is."""

    async def create_vhost(self, name: str) -> str:
        """Create an empty virtual host and return its AMQP URL."""

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host."""

    async def until_kept(self, queue: str, *, vhost: str = "/") -> None:
        """Wait until a quorum queue that was just declared would survive `kill`."""

    async def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` on it and return what it printed."""


def choose_source(kind: Kind, machine: Machine, *, variable: str, address: str | None) -> Source:
    """Decide where a server comes from.

    Args:
        kind: what is wanted.
        machine: asked in order, and no further than needed.
        variable: the environment variable that may hold an address, for the error.
        address: what it holds; empty counts as unset.

    Raises:
        NoServerError: nothing applies.

    """
    if address:
        return Source.ADDRESS
    if machine.docker_answers():
        return Source.DOCKER
    if _has_programs(kind, machine):
        return Source.BINARIES
    if machine.can_install():
        return Source.PACKAGES
    raise _no_server(kind, variable)


def database_address(environment: Mapping[str, str]) -> DatabaseAddress | None:
    """Return the database server for tests that the environment names.

    Raises:
        NoServerError: it names one in a form that we cannot read.

    """
    if not (text := environment.get(TEST_DATABASE_URL)):
        return None
    try:
        return DatabaseAddress.parse(text)
    except Exception as error:
        # SQLAlchemy and we have different errors; neither may print the password.
        raise NoServerError(f"bad {TEST_DATABASE_URL}: expected a URL like {_EXAMPLES[Kind.DATABASE]}") from error


def broker_address(environment: Mapping[str, str]) -> BrokerAddress | None:
    """Return the broker for tests that the environment names.

    Raises:
        NoServerError: it names one in a form that we cannot read.

    """
    if not (text := environment.get(TEST_BROKER_URL)):
        return None
    try:
        port = int(environment.get(TEST_BROKER_MANAGEMENT_PORT) or MANAGEMENT_PORT)
        return BrokerAddress.parse(text, management_port=port)
    except ValueError as error:
        raise NoServerError(
            f"bad {TEST_BROKER_URL} or {TEST_BROKER_MANAGEMENT_PORT}: "
            f"expected a URL like {_EXAMPLES[Kind.BROKER]} and a port number"
        ) from error


def own_database(
    folder: Path,
    *,
    lifeline: Lifeline,
    machine: InstallingMachine,
    flush_log_at_commit: int = 1,
    template: Path | None = None,
) -> DatabaseServer:
    """Return a database server of our own, not started: a container or a private instance.

    Args:
        folder: for the data of a private instance.
        lifeline: what a private instance hangs on.
        machine: this machine.
        flush_log_at_commit: see `MariaDbServer`.
        template: see `MariaDbServer`.

    Raises:
        NoServerError: there is no way to get one.

    """
    if choose_source(Kind.DATABASE, machine, variable=TEST_DATABASE_URL, address=None) is Source.DOCKER:
        from deploy.local.containers import MySqlContainer  # noqa: PLC0415 - testcontainers is for development only

        return MySqlContainer()
    binaries = mariadb_programs(machine, variable=TEST_DATABASE_URL)
    return MariaDbServer(
        folder, lifeline=lifeline, binaries=binaries, flush_log_at_commit=flush_log_at_commit, template=template
    )


def own_broker(folder: Path, *, lifeline: Lifeline, machine: InstallingMachine) -> BrokerServer:
    """Return a broker of our own, not started: a container or a private node.

    Args:
        folder: for the data of a private node.
        lifeline: what a private node hangs on.
        machine: this machine.

    Raises:
        NoServerError: there is no way to get one.

    """
    if choose_source(Kind.BROKER, machine, variable=TEST_BROKER_URL, address=None) is Source.DOCKER:
        from deploy.local.containers import RabbitMqContainer  # noqa: PLC0415 - testcontainers is for development only

        return RabbitMqContainer()
    return RabbitMqServer(folder, lifeline=lifeline, binaries=rabbitmq_programs(machine, variable=TEST_BROKER_URL))


def mariadb_programs(machine: InstallingMachine, *, variable: str) -> MariaDbBinaries:
    """Return the programs of MariaDB, installed first if need be and allowed.

    Raises:
        NoServerError: they are not to be had; the message names `variable` as another way.

    """
    found = machine.mariadb()
    if found is None and machine.can_install():
        _install(Kind.DATABASE, machine)
        found = machine.mariadb()
    if found is None:
        raise _no_server(Kind.DATABASE, variable)
    return found


def rabbitmq_programs(machine: InstallingMachine, *, variable: str) -> RabbitMqBinaries:
    """Return the programs of RabbitMQ, installed first if need be and allowed.

    Raises:
        NoServerError: they are not to be had; the message names `variable` as another way.

    """
    found = machine.rabbitmq()
    if found is None and machine.can_install():
        _install(Kind.BROKER, machine)
        found = machine.rabbitmq()
    if found is None:
        raise _no_server(Kind.BROKER, variable)
    return found


def _has_programs(kind: Kind, machine: Machine) -> bool:
    match kind:
        case Kind.DATABASE:
            return machine.mariadb() is not None
        case Kind.BROKER:
            return machine.rabbitmq() is not None
        case other:
            assert_never(other)


def _install(kind: Kind, machine: InstallingMachine) -> None:
    try:
        machine.install(PACKAGES[kind])
    except RuntimeError as error:
        raise NoServerError(str(error)) from error


def _no_server(kind: Kind, variable: str) -> NoServerError:
    return NoServerError(
        f"no {_NAMES[kind]} to run on. One of these helps:\n"
        f"  - set {variable}={_EXAMPLES[kind]}\n"
        f"  - start a Docker engine (`docker info` must succeed)\n"
        f"  - install {_PROGRAMS[kind]}; on Debian: sudo apt-get install {' '.join(PACKAGES[kind])}"
    )
