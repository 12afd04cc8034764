"""What `make up` runs, as data, and the environment that each service gets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

from aijobs.rpc.roles import Role

DATABASE_URL = "AIJOBS_DATABASE_URL"
BROKER_URL = "AIJOBS_BROKER_URL"
ADDRESS = "AIJOBS_ADDRESS"
LISTEN = "AIJOBS_LISTEN"
TOKEN = "AIJOBS_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_SECRET = "AIJOBS_TOKEN_SECRET"  # noqa: S105 - the name of a variable
#: Given to each service as it needs them, never inherited: somebody's shell may have sourced `.aijobs/up/env`.
_OURS = (DATABASE_URL, BROKER_URL, ADDRESS, LISTEN, TOKEN, TOKEN_SECRET)
#: For development: as long as anybody lets `make up` run. Each start makes new ones.
TOKEN_LIFETIME = timedelta(days=365)
#: Who the developer is in `.aijobs/up/env`: everything that a person or a backend may do.
DEVELOPER = "developer"
DEVELOPER_ROLES = (Role.ADMIN, Role.BACKEND, Role.USER)


class Need(StrEnum):
    """What a service is given besides its own address and the token secret."""

    DATABASE = "database"
    BROKER = "broker"
    JOBS = "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One of the processes.

    Attributes:
        name: in tables and log files.
        arguments: of the Python interpreter.
        port: where it listens if that is free.
        needs: what it is given.
        roles: of the token that it is given; no token if empty.

    """

    name: str
    arguments: Sequence[str]
    port: int
    needs: frozenset[Need]
    roles: Sequence[Role] = ()


class MintToken(Protocol):
    """`aijobs.rpc.auth.mint_token`."""

    def __call__(self, secret: str, /, *, subject: str, roles: Sequence[Role], lifetime: timedelta) -> str:
        """Return a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Processes in the order of their start, the first being the one that the others call.

    Attributes:
        migrate: arguments of the Python interpreter that bring the database up to date.
        services: what runs then.

    """

    migrate: Sequence[str]
    services: Sequence[Service]


AIJOBS = Stack(
    migrate=("-m", "services.cli", "migrate"),
    services=(
        Service(name="jobs", arguments=("-m", "services.jobs"), port=50051, needs=frozenset({Need.DATABASE})),
        Service(
            name="dispatcher",
            arguments=("-m", "services.dispatcher"),
            port=50052,
            needs=frozenset({Need.BROKER, Need.JOBS}),
            roles=(Role.DISPATCHER,),
        ),
        Service(
            name="executor",
            arguments=("-m", "services.executor"),
            port=50053,
            needs=frozenset({Need.BROKER, Need.JOBS}),
            roles=(Role.EXECUTOR,),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """What there is to connect to."""

    database_url: str
    broker_url: str
    jobs_address: str
    secret: str


def service_environment(service: Service, *, listen: str, connections: Connections, mint: MintToken) -> dict[str, str]:
    """Return what is added to the environment of a service: no more than it needs."""
    added = {LISTEN: listen, TOKEN_SECRET: connections.secret}
    if Need.DATABASE in service.needs:
        added[DATABASE_URL] = connections.database_url
    if Need.BROKER in service.needs:
        added[BROKER_URL] = connections.broker_url
    if Need.JOBS in service.needs:
        added[ADDRESS] = connections.jobs_address
    if service.roles:
        added[TOKEN] = mint(connections.secret, subject=service.name, roles=service.roles, lifetime=TOKEN_LIFETIME)
    return added


def inherited_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without what we give to each service ourselves."""
    return {name: value for name, value in environment.items() if name not in _OURS}


def developer_exports(*, jobs_address: str, secret: str, mint: MintToken) -> str:
    """Return the file to `source` in a shell in order to call the services."""
    token = mint(secret, subject=DEVELOPER, roles=DEVELOPER_ROLES, lifetime=TOKEN_LIFETIME)
    return f"export {ADDRESS}={jobs_address}\nexport {TOKEN}={token}\n"
