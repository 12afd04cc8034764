"""`make up` with stand-ins for the three services: `python tests/stand_ins/up.py FOLDER up|down|status [MIGRATION]`."""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from aijobs.rpc.roles import Role
from deploy.local.machine import LocalMachine
from deploy.local.stack import Need, Service, Stack
from deploy.local.status import down, status
from deploy.local.up import LocalUp

SERVICE = str(Path(__file__).with_name("service.py"))


def mint(secret: str, /, *, subject: str, roles: Sequence[Role], lifetime: timedelta) -> str:
    return f"token-of-{subject}-as-{'+'.join(roles)}"


def stack(migration: str) -> Stack:
    both = frozenset({Need.BROKER, Need.JOBS})
    return Stack(
        migrate=("-c", migration),
        services=(
            Service(name="jobs", arguments=(SERVICE, "serve"), port=50051, needs=frozenset({Need.DATABASE})),
            Service(name="dispatcher", arguments=(SERVICE, "serve"), port=50052, needs=both, roles=(Role.DISPATCHER,)),
            Service(name="executor", arguments=(SERVICE, "serve"), port=50053, needs=both, roles=(Role.EXECUTOR,)),
        ),
    )


def main(folder: str, action: str, migration: str = "") -> int:
    console = Console(width=200)
    match action:
        case "down":
            return asyncio.run(down(Path(folder), console))
        case "status":
            return status(Path(folder), console)
        case _:
            up = LocalUp(
                folder=Path(folder),
                stack=stack(migration),
                machine=LocalMachine(),
                environment=os.environ,
                mint=mint,
                console=console,
            )
            return asyncio.run(up.run())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
