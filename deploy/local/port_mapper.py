"""An Erlang port mapper (epmd) of our own: where the nodes of a RabbitMQ find each other."""

from collections.abc import Mapping
from pathlib import Path

from deploy.local.guarded import GuardedProcess
from deploy.local.lifeline import Lifeline
from deploy.local.ports import LOOPBACK, free_port


class PortMapper:
    """A port mapper as a private process. Started by a node instead, it would detach itself and outlive us.

    Args:
        binary: `epmd`.
        folder: where it runs; exists.
        log: its output is appended there.
        lifeline: what it hangs on.

    """

    def __init__(self, binary: Path, *, folder: Path, log: Path, lifeline: Lifeline) -> None:
        self.port = free_port()
        self._binary = binary
        self._folder = folder
        self._log = log
        self._lifeline = lifeline
        self._process: GuardedProcess | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start it, if it does not run.

        Raises:
            ProcessFailedError: it cannot be executed.

        """
        if self._process is None or not self._process.running:
            self._process = await GuardedProcess.start(
                [str(self._binary), "-port", str(self.port), "-address", LOOPBACK],
                lifeline=self._lifeline,
                log=self._log,
                environment=environment,
                folder=self._folder,
            )

    async def kill(self) -> None:
        """End it."""
        if self._process is not None:
            await self._process.kill()
