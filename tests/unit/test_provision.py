"""Where servers come from: decided by what there is, asked in order."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.local.mariadb import MariaDbBinaries
from deploy.local.provision import (
    Kind,
    NoServerError,
    Source,
    broker_address,
    choose_source,
    database_address,
    mariadb_programs,
    rabbitmq_programs,
)
from deploy.local.rabbitmq import RabbitMqBinaries

MARIADB = MariaDbBinaries(server=Path("mariadbd"), install=Path("mariadb-install-db"))
RABBITMQ = RabbitMqBinaries(server=Path("rabbitmq-server"), port_mapper=Path("epmd"))
DATABASE_URL = "mysql+aiomysql://me:p%40ss@db:3307/ignored"
BROKER_URL = "amqp://me:p%40ss@mq:5673/ignored"


@dataclass
class Machine:
    docker: bool = False
    programs: bool = False
    root: bool = False
    packages_help: bool = True
    asked: list[str] = field(default_factory=list)
    installed: list[str] = field(default_factory=list)

    def docker_answers(self) -> bool:
        self.asked.append("docker")
        return self.docker

    def mariadb(self) -> MariaDbBinaries | None:
        self.asked.append("programs")
        return MARIADB if self.programs else None

    def rabbitmq(self) -> RabbitMqBinaries | None:
        self.asked.append("programs")
        return RABBITMQ if self.programs else None

    def can_install(self) -> bool:
        self.asked.append("root")
        return self.root

    def install(self, packages) -> None:
        self.installed += packages
        self.programs = self.packages_help


def choose(kind: Kind, machine: Machine, address: str | None = None) -> Source:
    return choose_source(kind, machine, variable="AIJOBS_X_URL", address=address)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    ("machine", "address", "source", "asked"),
    [
        (Machine(docker=True, programs=True, root=True), "url", Source.ADDRESS, []),
        (Machine(docker=True, programs=True, root=True), None, Source.DOCKER, ["docker"]),
        (Machine(docker=True, programs=True, root=True), "", Source.DOCKER, ["docker"]),
        (Machine(programs=True, root=True), None, Source.BINARIES, ["docker", "programs"]),
        (Machine(root=True), None, Source.PACKAGES, ["docker", "programs", "root"]),
    ],
)
def test_the_first_source_that_applies_is_taken_and_no_further_one_is_asked(kind, machine, address, source, asked):
    machine.asked.clear()
    assert choose(kind, machine, address) is source
    assert machine.asked == asked


@pytest.mark.parametrize(
    ("kind", "package"), [(Kind.DATABASE, "mariadb-server-core"), (Kind.BROKER, "rabbitmq-server")]
)
def test_without_any_source_the_error_names_every_way_out(kind, package):
    with pytest.raises(NoServerError) as raised:
        choose(kind, Machine())
    for way in ("AIJOBS_X_URL=", "Docker", f"apt-get install {package}"):
        assert way in str(raised.value)


def test_programs_that_are_there_are_used_without_installing():
    machine = Machine(programs=True, root=True)
    assert mariadb_programs(machine, variable="X") is MARIADB
    assert rabbitmq_programs(machine, variable="X") is RABBITMQ
    assert machine.installed == []


def test_missing_programs_are_installed_where_allowed():
    machine = Machine(root=True)
    assert rabbitmq_programs(machine, variable="X") is RABBITMQ
    assert machine.installed == ["rabbitmq-server"]


@pytest.mark.parametrize("machine", [Machine(), Machine(root=True, packages_help=False)])
def test_programs_that_are_not_to_be_had_are_an_error_that_names_the_variable(machine):
    with pytest.raises(NoServerError, match="AIJOBS_DATABASE_URL="):
        mariadb_programs(machine, variable="AIJOBS_DATABASE_URL")


def test_addresses_for_tests_are_read_from_the_environment():
    database = database_address({"AIJOBS_TEST_DATABASE_URL": DATABASE_URL})
    broker = broker_address({"AIJOBS_TEST_BROKER_URL": BROKER_URL, "AIJOBS_TEST_BROKER_MANAGEMENT_PORT": "15673"})
    assert database is not None
    assert broker is not None
    assert database.url("x") == "mysql+aiomysql://me:p%40ss@db:3307/x"
    assert broker.url("x") == "amqp://me:p%40ss@mq:5673/x"
    assert broker.url() == "amqp://me:p%40ss@mq:5673/%2F"
    assert broker.management_port == 15673


def test_no_addresses_in_the_environment_are_no_addresses():
    assert database_address({}) is None
    assert broker_address({"AIJOBS_TEST_BROKER_URL": ""}) is None


@pytest.mark.parametrize("text", ["sqlite:///x", "secret:secret", "mysql://host:nonsense", "mysql+aiomysql:///x"])
def test_a_bad_database_address_is_named_without_being_shown(text):
    with pytest.raises(NoServerError, match="AIJOBS_TEST_DATABASE_URL") as raised:
        database_address({"AIJOBS_TEST_DATABASE_URL": text})
    assert text not in str(raised.value)


@pytest.mark.parametrize("text", ["http://host", "secret", "amqp://host:nonsense"])
def test_a_bad_broker_address_is_named_without_being_shown(text):
    with pytest.raises(NoServerError, match="AIJOBS_TEST_BROKER_URL") as raised:
        broker_address({"AIJOBS_TEST_BROKER_URL": text})
    assert text not in str(raised.value)


async def test_a_database_name_cannot_carry_sql():
    address = database_address({"AIJOBS_TEST_DATABASE_URL": DATABASE_URL})
    assert address is not None
    with pytest.raises(ValueError, match="bad database name"):
        await address.create_database("a`; DROP DATABASE mysql; --")
