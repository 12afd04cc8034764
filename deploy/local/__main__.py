"""`python -m deploy.local up|down|status`: the three services with a real database and broker on this machine."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console

from aijobs.rpc.auth import mint_token
from deploy.local.compose import ComposeUp, compose_answers
from deploy.local.machine import LocalMachine
from deploy.local.processes import ROOT
from deploy.local.stack import AIJOBS, BROKER_URL, DATABASE_URL
from deploy.local.status import down, status
from deploy.local.up import LocalUp

FOLDER = ROOT / ".aijobs" / "up"


def up(folder: Path, console: Console) -> int:
    """Run `make up`; returns the exit status."""
    machine = LocalMachine()
    addresses = os.environ.get(DATABASE_URL) and os.environ.get(BROKER_URL)
    if not addresses and machine.docker_answers() and compose_answers():
        return asyncio.run(ComposeUp(folder=folder, stack=AIJOBS, mint=mint_token, console=console).run())
    local = LocalUp(
        folder=folder, stack=AIJOBS, machine=machine, environment=os.environ, mint=mint_token, console=console
    )
    return asyncio.run(local.run())


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for data, logs, secret and pid file")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    console = Console()
    match arguments.action:
        case "up":
            return up(folder, console)
        case "down":
            return asyncio.run(down(folder, console))
        case _:
            return status(folder, console)


if __name__ == "__main__":
    sys.exit(main())
