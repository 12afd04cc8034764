"""Servers that all processes of a test run share, started by the first that needs one.

The process that leads the run makes a `SharedServers` and passes its folder on; every other process, and the leader
itself, asks `database` and `broker`. What runs is ended when the leader is done or dead, however it died.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.lifeline import Lifeline, exclusively
from deploy.local.provision import Kind, NoServerError, broker_address, database_address

ROOT = Path(__file__).resolve().parents[2]
END_WITHIN = timedelta(seconds=30)


class SharedServers:
    """The servers of a test run, for the process that leads it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="aijobs-tests-"))
        self._lifeline = Lifeline(self.folder / "lifeline").hold()

    def end(self) -> None:
        """End what was started, wait for it (at most 30 s) and remove the folder."""
        self._lifeline.release()
        for kind in Kind:
            if (alive := self.folder / f"{kind}.alive").exists():
                # A lock has no timeout, a thread has.
                waiting = threading.Thread(target=_wait_for, args=(alive,), daemon=True)
                waiting.start()
                waiting.join(END_WITHIN.total_seconds())
        shutil.rmtree(self.folder, ignore_errors=True)


def shared_database(folder: Path, environment: Mapping[str, str]) -> DatabaseAddress:
    """Return the run's database server; starts it if nobody has. Blocks meanwhile.

    Raises:
        NoServerError: there is none to be had.

    """
    return database_address(environment) or DatabaseAddress(**_shared(Kind.DATABASE, folder))


def shared_broker(folder: Path, environment: Mapping[str, str]) -> BrokerAddress:
    """Return the run's broker; starts it if nobody has. Blocks meanwhile.

    Raises:
        NoServerError: there is none to be had.

    """
    return broker_address(environment) or BrokerAddress(**_shared(Kind.BROKER, folder))


def _shared(kind: Kind, folder: Path) -> dict[str, Any]:
    reported = folder / f"{kind}.json"
    with exclusively(folder / f"{kind}.starting"):
        if not reported.exists():
            reported.write_text(_start(kind, folder), encoding="utf-8")
    answer = json.loads(reported.read_text(encoding="utf-8"))
    if "error" in answer:
        # Kept, so that a machine without a server is told once and not once per test.
        raise NoServerError(answer["error"])
    address: dict[str, Any] = answer["address"]
    return address


def _start(kind: Kind, folder: Path) -> str:
    """Start a host and return the line that it reports."""
    log = folder / f"{kind}.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.local.host", str(kind), str(folder)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ,
            start_new_session=True,
        )
    if process.stdout is None:
        raise RuntimeError("the host has no output")
    with process.stdout as output:
        line = output.readline().decode()
    if not line:
        raise NoServerError(f"the host of the {kind} ended\n{log.read_text(errors='replace')[-2000:]}")
    # It stays when we end; it is not ours to wait for.
    process.returncode = 0
    return line


def _wait_for(alive: Path) -> None:
    with exclusively(alive):
        pass
