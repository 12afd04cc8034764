"""A child process that does not outlive its owner."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

from deploy.local.lifeline import Lifeline

GUARD = Path(__file__).with_name("guard.py")
LAST_LINES = 20


class ProcessFailedError(Exception):
    """A process ended, or did not get ready in time; the message holds the end of its log."""


class GuardedProcess:
    """A running command under a guard (see `guard.py`).

    Not bound to an event loop: it may be started under one and stopped under another. Signals go to the command's
    whole process group.

    Args:
        guard: the guard's process.
        pid: the command's own pid.
        log: where its output goes.

    """

    def __init__(self, guard: "subprocess.Popen[bytes]", *, pid: int, log: Path) -> None:
        self._guard = guard
        self.pid = pid
        self.log = log

    @classmethod
    async def start(
        cls, command: Sequence[str], *, lifeline: Lifeline, log: Path, environment: Mapping[str, str], folder: Path
    ) -> Self:
        """Start `command` in `folder`; its output is appended to `log`.

        Raises:
            ProcessFailedError: the command cannot be executed.

        """
        return await asyncio.to_thread(
            cls._start, command, lifeline=lifeline, log=log, environment=environment, folder=folder
        )

    @classmethod
    def _start(
        cls, command: Sequence[str], *, lifeline: Lifeline, log: Path, environment: Mapping[str, str], folder: Path
    ) -> Self:
        lifeline.hold()
        reading, writing = os.pipe()
        try:
            with log.open("ab") as output:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(lifeline.path), str(writing), "--", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    cwd=folder,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except BaseException:  # raised on; nobody would close our end of the pipe
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as report:
            pid = report.read()
        if not pid:
            guard.wait()
            raise ProcessFailedError(f"cannot execute {command[0]}\n{tail(log)}")
        return cls(guard, pid=int(pid), log=log)

    @property
    def running(self) -> bool:
        """False once the command has ended."""
        return self._guard.poll() is None

    def require_running(self, name: str) -> None:
        """Do nothing while the command runs.

        Raises:
            ProcessFailedError: it has ended.

        """
        if (status := self._guard.poll()) is not None:
            raise ProcessFailedError(f"{name} ended with exit status {status}\n{tail(self.log)}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command's process group; nothing happens if it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def wait(self) -> int:
        """Wait for the end and return the exit status (128 + n for signal n)."""
        if (status := self._guard.poll()) is not None:
            return status
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        # Not reaped yet, so the pid is still the guard's.
        descriptor = os.pidfd_open(self._guard.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._guard.wait()

    async def kill(self) -> None:
        """End the command at once (SIGKILL); also when it is frozen or has ended."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self, *, patience: timedelta, pid: int | None = None) -> None:
        """Ask the command to end (SIGTERM) and kill it if it has not after `patience`.

        Args:
            patience: how long it may take.
            pid: the one process of the group to ask, if not all of them.

        """
        if pid is None:
            self.signal(signal.SIGTERM)
        elif self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        # A frozen process would not hear it.
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await self.wait()
        except TimeoutError:
            await self.kill()


def tail(log: Path, lines: int = LAST_LINES) -> str:
    """Return the last lines of a log file, indented."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"  ({log} was not written)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or f"  ({log} is empty)"
