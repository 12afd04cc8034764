"""Finding processes that nobody ended."""

import asyncio
import os
from pathlib import Path


def processes_about(folder: Path) -> list[str]:
    """Return the command lines of running processes that name the folder in command or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command + environment and int(process.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


async def until_gone(folder: Path) -> None:
    """Wait for the end of what runs in the folder: nobody's children, so there is no signal to wait for."""
    async with asyncio.timeout(20):
        while True:
            if not processes_about(folder):
                return
            await asyncio.sleep(0.05)
