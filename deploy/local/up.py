"""`make up` on local servers: database, broker, migrations, services; in the foreground until told to stop.

What is started is stopped in reverse order. If this process is killed, the guards end the rest (see `guard.py`).
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.local.database import UnreachableError
from deploy.local.guarded import GuardedProcess, ProcessFailedError, tail
from deploy.local.lifeline import Lifeline
from deploy.local.mariadb import MariaDbServer
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.processes import ROOT, ServiceProcess
from deploy.local.provision import InstallingMachine, NoServerError, mariadb_programs, rabbitmq_programs
from deploy.local.rabbitmq import RabbitMqServer
from deploy.local.running import run_alone
from deploy.local.secret_file import kept_secret, write_private
from deploy.local.stack import (
    BROKER_URL,
    DATABASE_URL,
    Connections,
    MintToken,
    Stack,
    developer_exports,
    inherited_environment,
    service_environment,
)
from deploy.local.status import status_table

DATABASE = "aijobs"
MIGRATE_WITHIN = timedelta(minutes=5)


class LocalUp:
    """One run of `make up` on local servers.

    Args:
        folder: keeps data, logs, secret and pid file; made if missing.
        stack: what to run.
        machine: where server programs come from.
        environment: may name a database (AIJOBS_DATABASE_URL) and a broker (AIJOBS_BROKER_URL) to use instead of our
            own; the rest is inherited by the services.
        mint: makes tokens.
        console: where to say what happens.

    """

    def __init__(
        self,
        *,
        folder: Path,
        stack: Stack,
        machine: InstallingMachine,
        environment: Mapping[str, str],
        mint: MintToken,
        console: Console,
    ) -> None:
        self._folder = folder
        self._stack = stack
        self._machine = machine
        self._environment = environment
        self._mint = mint
        self._console = console
        self._lifeline = Lifeline(folder / "lifeline")
        self._stops: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._ends: dict[str, tuple[Callable[[], Awaitable[int]], Path]] = {}
        self._rows: list[dict[str, str]] = []

    async def run(self) -> int:
        """Run until SIGINT, SIGTERM or the end of one of the processes; returns the exit status."""
        return await run_alone(self._folder, self._console, self._run)

    async def _run(self, asked: asyncio.Event) -> int:
        try:
            return await self._until(asked)
        except (ProcessFailedError, NoServerError, UnreachableError) as error:
            self._console.print(str(error), style="red", markup=False, highlight=False)
            return 1
        finally:
            await self._stop_all()
            (self._folder / "status.json").unlink(missing_ok=True)

    async def _until(self, asked: asyncio.Event) -> int:
        """Start everything and wait for a reason to stop; returns the exit status."""
        stopping = asyncio.create_task(asked.wait())
        starting = asyncio.create_task(self._start_all())
        watching: dict[asyncio.Task[int], str] = {}
        try:
            await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            await starting
            watching = {asyncio.create_task(self._wait(name)): name for name in self._ends}
            await asyncio.wait({stopping, *watching}, return_when=asyncio.FIRST_COMPLETED)
            # Whoever was asked to stop, or ended together with others, is no failure if we were asked too.
            ended = [] if stopping.done() else [(name, end) for end, name in watching.items() if end.done()]
            for name, end in ended:
                self._console.print(f"{name} ended with exit status {end.result()}; the end of its log:", style="red")
                self._console.print(tail(self._ends[name][1]), markup=False, highlight=False)
            return 1 if ended else 0
        finally:
            tasks: set[asyncio.Task[Any]] = {stopping, starting, *watching}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, name: str) -> int:
        return await self._ends[name][0]()

    async def _start_all(self) -> None:
        secret = kept_secret(self._folder / "token-secret")
        self._console.print("starting database and broker")
        database_url, broker_url = await self._database(), await self._broker()
        self._console.print("migrating the database")
        await self._migrate(database_url)
        listens = {service.name: f"{LOOPBACK}:{free_port(service.port)}" for service in self._stack.services}
        connections = Connections(
            database_url=database_url,
            broker_url=broker_url,
            jobs_address=listens[self._stack.services[0].name],
            secret=secret,
        )
        for service in self._stack.services:
            process = ServiceProcess(
                service.name,
                arguments=service.arguments,
                address=listens[service.name],
                environment=service_environment(
                    service, listen=listens[service.name], connections=connections, mint=self._mint
                ),
                inherited=inherited_environment(self._environment),
                log=self._folder / f"{service.name}.log",
                lifeline=self._lifeline,
            )
            self._stops.append((service.name, process.stop))
            self._console.print(f"starting {service.name}")
            await process.start()
            self._ends[service.name] = (process.wait, process.log)
            self._row(service.name, process.address, process.pid, process.log)
        self._report(connections)

    async def _database(self) -> str:
        """Return the URL of the database to use, started if the environment names none."""
        if url := self._environment.get(DATABASE_URL):
            self._row("database", f"as {DATABASE_URL} says")
            return url
        programs = await asyncio.to_thread(mariadb_programs, self._machine, variable=DATABASE_URL)
        server = MariaDbServer(self._folder / "mariadb", lifeline=self._lifeline, binaries=programs)
        self._stops.append(("database", server.stop))
        await server.start()
        self._ends["database"] = (server.wait, server.log)
        self._row("database", f"{LOOPBACK}:{server.address.port}", server.pid, server.log)
        return await server.address.create_database(DATABASE, exist_ok=True)

    async def _broker(self) -> str:
        """Return the URL of the broker to use, started if the environment names none."""
        if url := self._environment.get(BROKER_URL):
            self._row("broker", f"as {BROKER_URL} says")
            return url
        programs = await asyncio.to_thread(rabbitmq_programs, self._machine, variable=BROKER_URL)
        server = RabbitMqServer(self._folder / "rabbitmq", lifeline=self._lifeline, binaries=programs)
        self._stops.append(("broker", server.stop))
        await server.start()
        self._ends["broker"] = (server.wait, server.log)
        self._row("broker", f"{LOOPBACK}:{server.address.port}", server.pid, server.log)
        return server.url()

    async def _migrate(self, database_url: str) -> None:
        log = self._folder / "migrate.log"
        process = await GuardedProcess.start(
            [sys.executable, *self._stack.migrate],
            lifeline=self._lifeline,
            log=log,
            environment=inherited_environment(self._environment) | {DATABASE_URL: database_url},
            folder=ROOT,
        )
        try:
            async with asyncio.timeout(MIGRATE_WITHIN.total_seconds()):
                status = await process.wait()
        except TimeoutError as error:
            raise ProcessFailedError(f"the migrations took longer than {MIGRATE_WITHIN}\n{tail(log)}") from error
        finally:
            await process.kill()
        if status != 0:
            raise ProcessFailedError(f"the migrations failed with exit status {status}\n{tail(log)}")

    async def _stop_all(self) -> None:
        for name, stop in reversed(self._stops):
            self._console.print(f"stopping {name}")
            await stop()
        self._lifeline.release()
        if self._stops:
            self._console.print("stopped; the data stays in " + self._shown(self._folder))

    def _row(self, name: str, address: str, pid: int | None = None, log: Path | None = None) -> None:
        shown = "" if log is None else self._shown(log)
        self._rows.append({"service": name, "address": address, "pid": str(pid or ""), "log": shown})

    def _report(self, connections: Connections) -> None:
        exports = self._folder / "env"
        text = developer_exports(jobs_address=connections.jobs_address, secret=connections.secret, mint=self._mint)
        write_private(exports, text)
        write_private(self._folder / "status.json", json.dumps(self._rows))
        self._console.print(status_table(self._rows))
        self._console.print(
            f"call it:  source {self._shown(exports)}\n"
            "          .venv/bin/aijobs types\n"
            "          .venv/bin/aijobs jobs list\n"
            '          grpcurl -plaintext -H "authorization: Bearer $AIJOBS_TOKEN" $AIJOBS_ADDRESS list\n'
            "stop it:  Ctrl-C here, or `make down`",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    @staticmethod
    def _shown(path: Path) -> str:
        """Return a path as somebody in the project folder would write it."""
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
