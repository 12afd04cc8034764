"""What the private servers have in common: one guarded process on data of their own."""

import asyncio
import shutil
import signal
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from deploy.local.guarded import GuardedProcess, ProcessFailedError, tail
from deploy.local.lifeline import Lifeline

START_WITHIN = timedelta(seconds=90)


class LocalServer(ABC):
    """A server as a private process: started, frozen, killed and restarted on the same ports and data.

    Args:
        folder: its log and, under `data`, its data.
        log_name: file name of its log.
        lifeline: what it hangs on.

    """

    #: For messages.
    product: ClassVar[str]

    def __init__(self, folder: Path, *, log_name: str, lifeline: Lifeline) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / log_name
        self._lifeline = lifeline
        self._process: GuardedProcess | None = None

    @property
    def pid(self) -> int | None:
        """The server's process; None before the first start and after the end."""
        return self._process.pid if self._process is not None and self._process.running else None

    async def start(self, *, within: timedelta = START_WITHIN) -> None:
        """Start the server; it answers when this returns.

        Raises:
            ProcessFailedError: it ended, or did not answer in time. The message quotes its log.

        """
        await asyncio.to_thread(self._prepare)
        try:
            async with asyncio.timeout(within.total_seconds()):
                self._process = await self._launch()
                await self._answers(self._process)
        except TimeoutError as error:
            await self.kill()
            raise ProcessFailedError(f"{self.product} did not answer within {within}\n{tail(self.log)}") from error
        except BaseException:  # raised on, also a cancellation; a half-started server may not stay
            await self.kill()
            raise

    @abstractmethod
    async def stop(self) -> None:
        """Stop the server in an orderly way; its data stays."""

    async def kill(self) -> None:
        """End the server by SIGKILL; its data stays."""
        if self._process is not None:
            await self._process.kill()

    async def wait(self) -> int:
        """Wait for the end of the server and return its exit status.

        Raises:
            RuntimeError: it was never started.

        """
        if self._process is None:
            raise RuntimeError("not started")
        return await self._process.wait()

    async def discard(self) -> None:
        """End the server at once and remove its data; its logs stay."""
        await self.kill()
        await asyncio.to_thread(shutil.rmtree, self.folder / "data", ignore_errors=True)

    def freeze(self) -> None:
        """Let the server hang (SIGSTOP): connections stay open and nothing answers."""
        if self._process is not None:
            self._process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)

    async def restart(self) -> None:
        """Stop the server if it runs and start it on the same ports and data.

        Raises:
            ProcessFailedError: it ended, or did not answer in time.

        """
        await self.stop()
        await self.start()

    @abstractmethod
    def _prepare(self) -> None:
        """Lay out folders and configuration; in a thread."""

    @abstractmethod
    async def _launch(self) -> GuardedProcess:
        """Start the process."""

    @abstractmethod
    async def _answers(self, process: GuardedProcess) -> None:
        """Return once the server answers; raise if its process ends."""
