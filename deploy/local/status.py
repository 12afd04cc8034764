"""Looking at a `make up` that runs, and stopping it, from another process."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.local.running import PidFile, ProcessIdentity, end_process

#: More than all orderly stops together may take.
DOWN_WITHIN = timedelta(minutes=3)


def status_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of what runs; the state is the one at this moment."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("service", "address", "pid", "state", "log"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        pid = row["pid"]
        state = "external" if not pid else "running" if ProcessIdentity.of(int(pid)) else "[red]ended[/red]"
        table.add_row(row["service"], row["address"], pid, state, row["log"])
    return table


async def down(folder: Path, console: Console) -> int:
    """Stop the `make up` of this folder and wait for its end; returns the exit status."""
    owner = PidFile(folder / "pid").owner()
    if owner is None:
        console.print("nothing is running")
        return 0
    end_process(owner, signal.SIGTERM)
    with console.status(f"stopping process {owner.pid} and what it started"):
        if not await _ended(owner, within=DOWN_WITHIN):
            console.print(f"process {owner.pid} did not stop within {DOWN_WITHIN}: killed", style="red")
            end_process(owner, signal.SIGKILL)
            await _ended(owner, within=DOWN_WITHIN)
    return 0


def status(folder: Path, console: Console) -> int:
    """Print what runs; returns the exit status: 0 if something does, else 1."""
    owner = PidFile(folder / "pid").owner()
    if owner is None:
        console.print("nothing is running")
        return 1
    try:
        rows = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        console.print(f"process {owner.pid} is starting or stopping")
    else:
        console.print(status_table(rows))
    return 0


async def _ended(process: ProcessIdentity, *, within: timedelta) -> bool:
    """Wait for the end of a process that is not our child; False if it takes too long."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        if process.running:
            async with asyncio.timeout(within.total_seconds()):
                await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True
