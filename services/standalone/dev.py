"""`aijobs dev`: the embedded engine until Ctrl-C, and how to call it."""

import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console

from aijobs import logs
from aijobs.errors import AijobsError
from aijobs.registry import BadDefinitions
from aijobs.service import CannotRun, run_service
from services.standalone.engine import EngineNotStarted, embedded

DATA = Path(".aijobs")
DEFAULT_LISTEN = "127.0.0.1:50051"
BAD_START = 2

HOW_TO_CALL = """
  [bold]aijobs is running[/] on {address} (database {database}, Ctrl-C stops it)

  [dim]with the command line[/]
    .venv/bin/aijobs jobs create synthetic --user me --watch
    .venv/bin/aijobs jobs create structured_generation --user me --watch \\
      --input-file examples/structured_generation.json
    .venv/bin/aijobs types
    .venv/bin/aijobs jobs list

  [dim]with grpcurl[/]
    grpcurl -plaintext -d '{{"user_id": "me", "job_type": "synthetic", "input": {{}}}}' \\
      {address} aijobs.v1.JobService/CreateJob

  [dim]with buf curl (make setup installs it)[/]
    .venv/bin/buf curl --protocol grpc --http2-prior-knowledge \\
      -d '{{"user_id": "me", "job_type": "synthetic", "input": {{}}}}' http://{address}/aijobs.v1.JobService/CreateJob
"""


def run() -> int:
    """Run the engine until SIGINT or SIGTERM and return the exit status: 0 stopped, 1 failed, 2 started wrongly.

    AIJOBS_LISTEN chooses another address.
    """
    logs.configure("aijobs", "warning")
    console = Console(highlight=False)
    database = DATA / "dev.db"
    failure: list[Exception] = []

    async def main(stop: asyncio.Event) -> None:
        try:
            await asyncio.to_thread(DATA.mkdir, exist_ok=True)
            listen = os.environ.get("AIJOBS_LISTEN", DEFAULT_LISTEN)
            async with embedded(database, stop, listen=listen) as address:
                console.print(HOW_TO_CALL.format(address=address, database=database), soft_wrap=True)
                await stop.wait()
                console.print("stopping; running jobs have a moment to finish (Ctrl-C again ends at once)")
        except (AijobsError, BadDefinitions, CannotRun, EngineNotStarted, OSError, ValueError) as error:
            failure.append(error)

    status = run_service(main)
    if failure:
        print(f"aijobs dev cannot start: {failure[0]}", file=sys.stderr)  # noqa: T201 - this is a command
        return BAD_START
    return status
