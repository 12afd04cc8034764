"""Several RabbitMQ nodes on this machine that are one cluster."""

import asyncio
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from deploy.local.guarded import ProcessFailedError
from deploy.local.lifeline import Lifeline
from deploy.local.port_mapper import PortMapper
from deploy.local.rabbitmq import Membership, RabbitMqBinaries, RabbitMqServer
from deploy.local.secret_file import kept_secret

#: They share the machine with each other while they boot.
START_WITHIN = timedelta(minutes=3)


class RabbitMqCluster:
    """Nodes with their own folders and ports that share a port mapper, a cookie and a login.

    They end when their lifeline is abandoned.

    Args:
        folder: made if missing.
        lifeline: what they hang on.
        binaries: what to run.
        size: how many nodes.

    """

    def __init__(self, folder: Path, *, lifeline: Lifeline, binaries: RabbitMqBinaries, size: int = 3) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._mapper = PortMapper(
            binaries.port_mapper, folder=folder, log=folder / "port_mapper.log", lifeline=lifeline
        )
        names = [f"aijobs{number}@localhost" for number in range(1, size + 1)]
        cookie, password = kept_secret(folder / "cookie"), kept_secret(folder / "password")
        self.nodes: Sequence[RabbitMqServer] = [
            RabbitMqServer(
                folder / name.partition("@")[0],
                lifeline=lifeline,
                binaries=binaries,
                membership=Membership(name=name, names=names, mapper=self._mapper, cookie=cookie, password=password),
            )
            for name in names
        ]

    async def start(self) -> None:
        """Start all nodes; they are one cluster when this returns.

        Raises:
            ProcessFailedError: one ended, or they did not answer in time. The message quotes its log.

        """
        # Before any node does: two of them would start two.
        await self._mapper.start({"HOME": os.devnull, "PATH": os.environ.get("PATH", os.defpath)})
        await asyncio.gather(*(node.start(within=START_WITHIN) for node in self.nodes))
        running = json.loads(await self.nodes[0].control("cluster_status", "--formatter", "json"))["running_nodes"]
        if sorted(running) != sorted(node.name for node in self.nodes):
            raise ProcessFailedError(f"no cluster of {len(self.nodes)} nodes came about, only {running}")

    async def leader(self, queue: str) -> RabbitMqServer:
        """Return the node that leads a quorum queue of the virtual host `/`, as the nodes themselves say.

        Raises:
            ProcessFailedError: they do not say.
            LookupError: there is no such queue, or not every node holds it.

        """
        asked = next(node for node in self.nodes if node.pid is not None)
        said = await asked.control("list_queues", "name", "leader", "members", "--formatter", "json")
        for row in json.loads(said):
            if row["name"] == queue and len(row["members"]) == len(self.nodes):
                return next(node for node in self.nodes if node.name == row["leader"])
        raise LookupError(f"no queue {queue} on {len(self.nodes)} nodes: {said}")

    async def discard(self) -> None:
        """End all nodes at once and remove their data; their logs stay."""
        await asyncio.gather(*(node.discard() for node in self.nodes))
        await self._mapper.kill()
