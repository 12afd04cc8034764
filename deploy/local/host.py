"""Runs one server for all processes of a test run: `python -m deploy.local.host KIND FOLDER`.

The workers of pytest-xdist are processes that come and go; the server must outlive the one that happened to need it
first. So it belongs to neither but to this process, which stays until nobody holds `FOLDER/lifeline`. It prints one
line of JSON: the address, or an error.
"""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from deploy.local.guarded import ProcessFailedError
from deploy.local.lifeline import Lifeline, exclusively, wait_until_abandoned
from deploy.local.machine import LocalMachine
from deploy.local.provision import BrokerServer, DatabaseServer, Kind, NoServerError, own_broker, own_database


async def host(kind: Kind, folder: Path) -> int:
    """Start the server, report it, and discard it when the folder's lifeline is abandoned."""
    # Not the shared one: that would be a user that never lets go.
    own_lifeline = Lifeline(folder / f"{kind}.lifeline")
    try:
        server = _server(kind, folder, own_lifeline)
        await server.start()
    except (NoServerError, ProcessFailedError) as error:
        _report({"error": str(error)})
        return 1
    try:
        _report({"address": asdict(server.address)})
        await asyncio.to_thread(wait_until_abandoned, folder / "lifeline")
    finally:
        await server.discard()
        if kind is Kind.DATABASE:
            shutil.rmtree(folder / "mariadb-template", ignore_errors=True)
    return 0


def _server(kind: Kind, folder: Path, lifeline: Lifeline) -> DatabaseServer | BrokerServer:
    if kind is Kind.BROKER:
        return own_broker(folder / kind, lifeline=lifeline, machine=LocalMachine())
    # 2: tests kill the server, not the machine, and every commit waits for the disk otherwise.
    return own_database(
        folder / kind,
        lifeline=lifeline,
        machine=LocalMachine(),
        flush_log_at_commit=2,
        template=folder / "mariadb-template",
    )


def _report(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
    # Whoever started us reads to the end of the line, and may be gone before us.
    sys.stdout = sys.stderr


def main(kind: str, folder: str) -> int:
    """Entry point; returns the exit status."""
    with exclusively(Path(folder) / f"{kind}.alive"):
        return asyncio.run(host(Kind(kind), Path(folder)))


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2])
    sys.stderr.flush()
    os._exit(status)
