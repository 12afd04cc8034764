"""The pid file of `make up`: which process it is, also after that pid has gone to somebody else."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from deploy.local.lifeline import exclusively
from deploy.local.secret_file import write_private

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process of this machine, now and for ever: a pid is reused, a pid with its start time and boot is not."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of a running process, None if there is none (or just its zombie)."""
        try:
            # The name in parentheses may hold anything, so count from its end: state is field 3, starttime field 22.
            fields = (
                (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] == "Z" else cls(pid=pid, started=f"{boot}/{fields[19]}")

    @property
    def running(self) -> bool:
        """True while this very process runs."""
        return ProcessIdentity.of(self.pid) == self


class PidFile:
    """A file that names the one process that may do something.

    Args:
        path: of the file; a claim makes its folder if that is missing.

    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def owner(self) -> ProcessIdentity | None:
        """Return the running process that the file names; None if there is none, or its file is stale or broken."""
        try:
            named = ProcessIdentity(**json.loads(self._path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return named if named.running else None

    def claim(self) -> ProcessIdentity | None:
        """Make this process the owner; None if that worked, else the process that is it already."""
        mine = ProcessIdentity.of(os.getpid())
        if mine is None:
            raise RuntimeError("this process is not in /proc")
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Two claims of a stale file at the same time would each remove the other's.
        with exclusively(self._path.with_name(f"{self._path.name}.lock")):
            if (owner := self.owner()) is not None:
                return owner
            write_private(self._path, json.dumps(asdict(mine)))
        return None

    def release(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


async def run_alone(folder: Path, console: Console, work: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Do the work of `make up` as the only process that does it in this folder; returns its exit status.

    Args:
        folder: keeps the pid file; made if missing.
        console: where to say that another process is at it.
        work: gets what SIGINT and SIGTERM set.

    """
    # Signals first: who reads the pid file may ask us to stop at once.
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    pid_file = PidFile(folder / "pid")
    if (owner := pid_file.claim()) is not None:
        console.print(f"already running as process {owner.pid}; `make down` stops it")
        return 1
    try:
        return await work(asked)
    finally:
        pid_file.release()


def end_process(process: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to a process if it still runs; never to another one that got its pid."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # From here on the descriptor means one process; check that it is the right one.
            if process.running:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
