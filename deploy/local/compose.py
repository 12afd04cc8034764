"""`make up` where a Docker engine answers: Docker Compose in the foreground.

The machines this was developed on have no Docker engine, so this has not been run there; a unit test holds
`deploy/compose.yaml` against what it says about itself.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from deploy.local.processes import ROOT
from deploy.local.running import run_alone
from deploy.local.secret_file import kept_secret, write_private
from deploy.local.stack import TOKEN, TOKEN_LIFETIME, TOKEN_SECRET, MintToken, Stack, developer_exports

COMPOSE_FILE = ROOT / "deploy" / "compose.yaml"
PROJECT = "aijobs"
#: Published by compose.yaml on loopback.
JOBS_ADDRESS = "127.0.0.1:50051"


def compose_answers() -> bool:
    """Tell whether the Docker client has the Compose plugin."""
    if shutil.which("docker") is None:
        return False
    probe = subprocess.run(
        ["docker", "compose", "version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
    )
    return probe.returncode == 0


def compose_variables(stack: Stack, *, secret: str, database: str, broker: str, mint: MintToken) -> dict[str, str]:
    """Return what compose.yaml asks of its environment file.

    Args:
        stack: whose services get tokens.
        secret: that tokens are signed with.
        database: password of the database.
        broker: password of the broker.
        mint: makes tokens.

    """
    variables = {TOKEN_SECRET: secret, "MYSQL_PASSWORD": database, "RABBITMQ_PASSWORD": broker}
    for service in stack.services:
        if service.roles:
            token = mint(secret, subject=service.name, roles=service.roles, lifetime=TOKEN_LIFETIME)
            variables[f"{service.name.upper()}_{TOKEN}"] = token
    return variables


class ComposeUp:
    """One run of `make up` with Docker Compose.

    Args:
        folder: keeps secrets and pid file; made if missing.
        stack: whose services get tokens.
        mint: makes tokens.
        console: where to say what happens.

    """

    def __init__(self, *, folder: Path, stack: Stack, mint: MintToken, console: Console) -> None:
        self._folder = folder
        self._stack = stack
        self._mint = mint
        self._console = console

    async def run(self) -> int:
        """Run until SIGINT, SIGTERM or the failure of a container; returns the exit status."""
        return await run_alone(self._folder, self._console, self._run)

    async def _run(self, asked: asyncio.Event) -> int:
        try:
            self._write_secrets()
            return await self._until(asked)
        finally:
            # Also after a failure: containers outlive the client. The volumes stay.
            down = await asyncio.create_subprocess_exec(*self._command("down"), cwd=ROOT, start_new_session=True)
            await down.wait()

    async def _until(self, asked: asyncio.Event) -> int:
        # Its own session: Ctrl-C is for us, and `down` then stops everything.
        compose = await asyncio.create_subprocess_exec(
            *self._command("up", "--build", "--abort-on-container-failure"), cwd=ROOT, start_new_session=True
        )
        ending, stopping = asyncio.create_task(compose.wait()), asyncio.create_task(asked.wait())
        await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ending.done():
            compose.terminate()
            await ending
            return 0
        return ending.result()

    def _write_secrets(self) -> None:
        secret = kept_secret(self._folder / "token-secret")
        variables = compose_variables(
            self._stack,
            secret=secret,
            database=kept_secret(self._folder / "mysql-password"),
            broker=kept_secret(self._folder / "rabbitmq-password"),
            mint=self._mint,
        )
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        write_private(self._folder / ".env", "".join(lines))
        exports = developer_exports(jobs_address=JOBS_ADDRESS, secret=secret, mint=self._mint)
        write_private(self._folder / "env", exports)
        self._console.print(f"call it:  source {self._folder / 'env'}")

    def _command(self, *arguments: str) -> Sequence[str]:
        return [
            *("docker", "compose", "--project-name", PROJECT, "--file", str(COMPOSE_FILE)),
            *("--env-file", str(self._folder / ".env")),
            *arguments,
        ]
