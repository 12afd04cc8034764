"""A private RabbitMQ node with its own folder, ports, cookie and Erlang port mapper (epmd), alone or in a cluster."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from deploy.local.broker import BrokerAddress, QueueDepth
from deploy.local.database import UnreachableError
from deploy.local.guarded import GuardedProcess
from deploy.local.lifeline import Lifeline
from deploy.local.port_mapper import PortMapper
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.rabbitmqctl import control
from deploy.local.secret_file import kept_secret, write_private
from deploy.local.server import LocalServer

USER = "aijobs"
NODE = "aijobs@localhost"
# With the management plugin an orderly stop takes 6 s, whatever there is to do.
STOP_WITHIN = timedelta(seconds=20)
# The scripts themselves: the wrapper in /usr/sbin changes the user and drops the environment.
_DEBIAN = "/usr/lib/rabbitmq/bin"
_PATH = os.pathsep.join([_DEBIAN, os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
#: Not ours by inheritance: a RabbitMQ of the machine may have its settings in the environment.
_FOREIGN = ("RABBITMQ_", "ERL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitMqBinaries:
    """The two programs that a private node needs."""

    server: Path
    port_mapper: Path

    @classmethod
    def find(cls) -> "RabbitMqBinaries | None":
        """Return the programs of this machine, None if one is missing."""
        server = shutil.which("rabbitmq-server", path=_PATH)
        port_mapper = shutil.which("epmd", path=_PATH)
        return cls(server=Path(server), port_mapper=Path(port_mapper)) if server and port_mapper else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A node's place in a cluster (see `RabbitMqCluster`): its name, those of all, and what they share."""

    name: str
    names: Sequence[str]
    mapper: PortMapper
    cookie: str
    password: str


class RabbitMqServer(LocalServer):
    """A RabbitMQ of our own, with the management API. It ends when its lifeline is abandoned.

    Args:
        folder: where data, logs, cookie and password live; made if missing. Data of an earlier node there is used.
        lifeline: what the server hangs on.
        binaries: what to run.
        port: a free port on loopback for AMQP; the same after a restart.
        membership: of a cluster; None: it stays alone.

    """

    product = "RabbitMQ"

    def __init__(
        self,
        folder: Path,
        *,
        lifeline: Lifeline,
        binaries: RabbitMqBinaries,
        port: int | None = None,
        membership: Membership | None = None,
    ) -> None:
        super().__init__(folder, log_name="rabbitmq.log", lifeline=lifeline)
        self.address = BrokerAddress(
            host=LOOPBACK,
            port=port or free_port(),
            management_port=free_port(),
            user=USER,
            password=membership.password if membership else kept_secret(folder / "password"),
        )
        self.name = membership.name if membership else NODE
        self._binaries = binaries
        self._distribution_port = free_port()
        self._membership = membership
        own = PortMapper(binaries.port_mapper, folder=folder, log=self.log, lifeline=lifeline)
        self._mapper = membership.mapper if membership else own

    @property
    def pid(self) -> int | None:
        """The node's process; None before the first start and after the end."""
        if self._process is None or not self._process.running:
            return None
        try:
            return int((self.folder / "pid").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    async def stop(self) -> None:
        """Stop the node in an orderly way, then its port mapper; durable data stays."""
        if self._process is not None:
            # The process itself: its shell wrapper would pass the signal on only now and then.
            await self._process.stop(patience=STOP_WITHIN, pid=self.pid)
        await self._end_mapper()

    async def kill(self) -> None:
        """End the node by SIGKILL, and its port mapper; durable data stays."""
        await super().kill()
        await self._end_mapper()

    def url(self, vhost: str = "/") -> str:
        """Return the AMQP URL of a virtual host (see `BrokerAddress`)."""
        return self.address.url(vhost)

    async def create_vhost(self, name: str) -> str:
        """Create an empty virtual host and return its AMQP URL (see `BrokerAddress`)."""
        return await self.address.create_vhost(name)

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all that is in it (see `BrokerAddress`)."""
        await self.address.delete_vhost(name)

    async def depth(self, queue: str, *, vhost: str = "/") -> QueueDepth:
        """Count a queue's messages at this moment (see `BrokerAddress`)."""
        return await self.address.depth(queue, vhost=vhost)

    async def until_kept(self, queue: str, *, vhost: str = "/") -> None:
        """Wait until a quorum queue that was just declared would survive `kill`.

        Its messages do as soon as they are confirmed, but RabbitMQ writes the queue's own registration to disk about
        1 s after the declaration (file `names.dets`; 3.10, ra 2.2). A node that is killed before comes back with a
        queue that never finds a leader, and consumers hang.

        Raises:
            TimeoutError: it is not on disk after 10 s.

        """
        name = f"{'%2F' if vhost == '/' else vhost}_{queue}".encode()
        async with asyncio.timeout(10):
            while True:
                files = (self.folder / "data").rglob("quorum/*/names.dets")
                if any(name in file.read_bytes() for file in files):
                    return
                await asyncio.sleep(0.05)

    async def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` on the node and return what it printed.

        Raises:
            ProcessFailedError: it failed, or took more than a minute.

        """
        program = self._binaries.server.with_name("rabbitmqctl")
        return await control(
            program, arguments, environment=self._environment(), folder=self.folder, lifeline=self._lifeline
        )

    async def _end_mapper(self) -> None:
        # One that is shared ends with the cluster.
        if self._membership is None:
            await self._mapper.kill()

    async def _launch(self) -> GuardedProcess:
        environment = self._environment()
        await self._mapper.start(environment)
        return await GuardedProcess.start(
            [str(self._binaries.server)],
            lifeline=self._lifeline,
            log=self.log,
            environment=environment,
            folder=self.folder,
        )

    async def _answers(self, process: GuardedProcess) -> None:
        while True:
            process.require_running("RabbitMQ")
            try:
                await self.address.ping()
                await self.address.set_policies()
            except UnreachableError:
                await asyncio.sleep(0.05)
            else:
                return

    def _prepare(self) -> None:
        for name in ("home", "log", "data"):
            (self.folder / name).mkdir(exist_ok=True)
        # Left by an earlier node, it would name a process that is not ours.
        (self.folder / "pid").unlink(missing_ok=True)
        cookie = self.folder / "home" / ".erlang.cookie"
        if self._membership is None:
            kept_secret(cookie)
        elif not cookie.exists():
            write_private(cookie, self._membership.cookie)
        cookie.chmod(0o400)
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management].\n", encoding="ascii")
        write_private(
            self.folder / "rabbitmq.conf",
            f"listeners.tcp.default = {LOOPBACK}:{self.address.port}\n"
            f"management.tcp.ip = {LOOPBACK}\n"
            f"management.tcp.port = {self.address.management_port}\n"
            f"default_user = {USER}\n"
            f"default_pass = {self.address.password}\n" + self._peers(),
        )

    def _peers(self) -> str:
        """Return the settings that make a new node look for the others."""
        if self._membership is None:
            return ""
        nodes = enumerate(self._membership.names, start=1)
        return "cluster_formation.peer_discovery_backend = classic_config\n" + "".join(
            f"cluster_formation.classic_config.nodes.{number} = {name}\n" for number, name in nodes
        )

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return inherited | {
            "HOME": str(self.folder / "home"),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.address.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            # One scheduler that sleeps when idle: the machine is shared with the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
            # Also the console, so that the end of our log says why a node did not start.
            "RABBITMQ_LOGS": "-",
            "ERL_EPMD_PORT": str(self._mapper.port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
        }
