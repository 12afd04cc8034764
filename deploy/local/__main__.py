"""`python -m deploy.local up|down|status`: the three services with a real database and broker on this machine."""

import argparse
import asyncio
import os
import sys
from pkgutil import resolve_name

from rich.console import Console

from deploy.local.compose import ComposeUp, compose_answers
from deploy.local.machine import LocalMachine
from deploy.local.processes import ROOT
from deploy.local.stack import AIJOBS, BROKER_URL, DATABASE_URL, MintToken
from deploy.local.status import down, status
from deploy.local.up import LocalUp

FOLDER = ROOT / ".aijobs" / "up"


def up(console: Console) -> int:
    """Run `make up`; returns the exit status."""
    mint: MintToken = resolve_name("aijobs.rpc.auth:mint_token")
    machine = LocalMachine()
    addresses = os.environ.get(DATABASE_URL) and os.environ.get(BROKER_URL)
    if not addresses and machine.docker_answers() and compose_answers():
        return asyncio.run(ComposeUp(folder=FOLDER, stack=AIJOBS, mint=mint, console=console).run())
    return asyncio.run(
        LocalUp(folder=FOLDER, stack=AIJOBS, machine=machine, environment=os.environ, mint=mint, console=console).run()
    )


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    console = Console()
    match parser.parse_args().action:
        case "up":
            return up(console)
        case "down":
            return asyncio.run(down(FOLDER, console))
        case _:
            return status(FOLDER, console)


if __name__ == "__main__":
    sys.exit(main())
