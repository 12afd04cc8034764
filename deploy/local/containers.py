"""MySQL and RabbitMQ in Docker containers, through testcontainers.

Written against testcontainers 4.15 and docker-py, and type-checked; the machines this was developed on have no Docker
engine, so unlike the rest of this package it has not been run there. What is shared with the private servers is
everything that clients see (`database`, `broker`); here is only starting and stopping.

testcontainers is a development dependency: import this module only where containers are really wanted. Its reaper
container (Ryuk) ends what a killed owner leaves behind.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta

from docker.errors import APIError  # type: ignore[import-untyped] # docker-py has no type hints
from testcontainers.core.container import DockerContainer

from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress, UnreachableError
from deploy.local.guarded import ProcessFailedError
from deploy.local.ports import LOOPBACK, free_port

MYSQL_IMAGE = "mysql:8.4"
RABBITMQ_IMAGE = "rabbitmq:4-management"
#: The image may have to be pulled first.
START_WITHIN = timedelta(minutes=5)


class _Container:
    """A container on fixed ports, so that a restart keeps the address."""

    def __init__(self, container: DockerContainer, *, name: str, ping: Callable[[], Awaitable[None]]) -> None:
        self._container = container
        self._name = name
        self._ping = ping
        self._created = False

    async def start(self) -> None:
        """Create the container, or start the stopped one; it answers when this returns.

        Raises:
            ProcessFailedError: it did not answer in time. The message quotes its log.

        """
        if self._created:
            await asyncio.to_thread(self._container.get_wrapped_container().start)
        else:
            self._created = True
            await asyncio.to_thread(self._container.start)
        try:
            async with asyncio.timeout(START_WITHIN.total_seconds()):
                await self._answers()
        except TimeoutError as error:
            output, errors = await asyncio.to_thread(self._container.get_logs)
            log = (output + errors).decode(errors="replace")[-3000:]
            await self.discard()
            raise ProcessFailedError(f"{self._name} did not answer within {START_WITHIN}\n{log}") from error

    async def stop(self) -> None:
        """Stop the container in an orderly way; its data stays until `discard`."""
        await asyncio.to_thread(self._container.get_wrapped_container().stop)

    async def kill(self) -> None:
        """End the container's process by SIGKILL, if it runs; its data stays until `discard`."""
        # Of a container that does not run, the engine says 409.
        with contextlib.suppress(APIError):
            await asyncio.to_thread(self._container.get_wrapped_container().kill)

    def freeze(self) -> None:
        """Let the server hang."""
        self._container.get_wrapped_container().pause()

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._container.get_wrapped_container().unpause()

    async def restart(self) -> None:
        """Stop the container if it runs and start it on the same port and data."""
        await self.stop()
        await self.start()

    async def discard(self) -> None:
        """End the container whatever its state, and drop its data."""
        if self._created:
            self._created = False
            await asyncio.to_thread(self._container.stop)

    async def _answers(self) -> None:
        while True:
            try:
                await self._ping()
            except UnreachableError:
                await asyncio.sleep(0.1)
            else:
                return


class MySqlContainer(_Container):
    """MySQL in a container."""

    def __init__(self) -> None:
        password = secrets.token_hex(16)
        self.address = DatabaseAddress(host=LOOPBACK, port=free_port(), user="root", password=password)
        container = (
            DockerContainer(MYSQL_IMAGE)
            .with_env("MYSQL_ROOT_PASSWORD", password)
            .with_bind_ports(3306, self.address.port)
        )
        super().__init__(container, name=MYSQL_IMAGE, ping=self.address.ping)

    async def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL (see `DatabaseAddress`)."""
        return await self.address.create_database(name)


class RabbitMqContainer(_Container):
    """RabbitMQ with the management plugin in a container."""

    def __init__(self) -> None:
        self.address = BrokerAddress(
            host=LOOPBACK,
            port=free_port(),
            management_port=free_port(),
            user="aijobs",
            password=secrets.token_hex(16),
        )
        container = (
            DockerContainer(RABBITMQ_IMAGE)
            .with_env("RABBITMQ_DEFAULT_USER", self.address.user)
            .with_env("RABBITMQ_DEFAULT_PASS", self.address.password)
            .with_bind_ports(5672, self.address.port)
            .with_bind_ports(15672, self.address.management_port)
            # The node's name, and with it its data folder, has the host name in it.
            .with_kwargs(hostname="aijobs")
        )
        super().__init__(container, name=RABBITMQ_IMAGE, ping=self._ready)

    async def _ready(self) -> None:
        await self.address.ping()
        await self.address.set_policies()

    async def create_vhost(self, name: str) -> str:
        """Create an empty virtual host and return its AMQP URL (see `BrokerAddress`)."""
        return await self.address.create_vhost(name)

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all that is in it (see `BrokerAddress`)."""
        await self.address.delete_vhost(name)

    async def until_kept(self, queue: str, *, vhost: str = "/") -> None:
        """Wait until a quorum queue that was just declared would survive `kill` (see `RabbitMqServer`).

        Raises:
            TimeoutError: it is not on disk after 10 s.

        """
        name = f"{'%2F' if vhost == '/' else vhost}_{queue}"
        look = ["sh", "-c", 'grep -qF "$0" /var/lib/rabbitmq/mnesia/*/quorum/*/names.dets', name]
        async with asyncio.timeout(10):
            while True:
                found = await asyncio.to_thread(self._container.get_wrapped_container().exec_run, look)
                if found.exit_code == 0:
                    return
                await asyncio.sleep(0.1)

    async def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` in the container and return what it printed (see `RabbitMqServer`)."""
        run = self._container.get_wrapped_container().exec_run
        done = await asyncio.to_thread(run, ["rabbitmqctl", "--quiet", *arguments])
        said = str(done.output.decode(errors="replace"))
        if done.exit_code:
            raise ProcessFailedError(f"rabbitmqctl {arguments[0]} failed\n{said}")
        return said
