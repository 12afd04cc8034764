"""`aijobs` as a person runs it: a process, its output and its exit status."""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
WITHIN_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that has ended."""

    status: int
    out: str
    err: str


class Running:
    """A process in progress and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    @classmethod
    async def start(cls, *arguments: str, environment: Mapping[str, str], folder: Path = ROOT) -> Self:
        """Start `python …` in a folder, with nothing of ours in its environment but what is given."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIJOBS_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            cwd=folder,
            env=inherited | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)} | dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def until(self, text: str) -> str:
        """Read standard output up to the line with a text and return all of it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_SECONDS):
            while text not in self.said:
                line = await self.process.stdout.readline()
                assert line, self.said
                self.said += line.decode()
        return self.said

    async def ended(self) -> Ended:
        """Wait for the end."""
        async with asyncio.timeout(WITHIN_SECONDS):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        self.said += out.decode()
        ended = Ended(status=self.process.returncode, out=self.said, err=err.decode())
        assert "Traceback" not in ended.out + ended.err, ended
        return ended

    async def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()


async def aijobs(*arguments: str, environment: Mapping[str, str], folder: Path = ROOT) -> Ended:
    """Run a command to its end."""
    running = await Running.start("-m", "services.cli", *arguments, environment=environment, folder=folder)
    try:
        return await running.ended()
    finally:
        await running.end()
