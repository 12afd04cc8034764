"""The real thing: jobs service, dispatcher and executor as three processes on a real database and broker.

They are started as `make up` starts them, with tokens; what a test wants otherwise comes in as environment variables.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Executable, RowMapping, Table, func, select

from aijobs.client import Client
from aijobs.rpc.auth import mint_token
from aijobs.rpc.roles import Role
from aijobs.v1 import job_pb2
from deploy.local.lifeline import Lifeline
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.processes import ServiceProcess
from deploy.local.stack import AIJOBS, Connections, inherited_environment, service_environment
from services.jobs.migrate import upgrade_with
from services.jobs.store.database import Database
from services.jobs.store.tables import job_artifacts, job_history, jobs, outbox_events
from tests.acceptance.waiting import WITHIN, until

USER = "user-1"


class Engine:
    """Three processes and their database.

    Args:
        folder: for log files; exists.
        database_url: an empty database.
        broker_url: an empty virtual host.
        environment: added to that of every service.
        direct_database_url: where this process reads the database, if not where the services do.

    """

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str,
        broker_url: str,
        environment: Mapping[str, str],
        direct_database_url: str | None = None,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._lifeline = Lifeline(folder / "lifeline").hold()
        self._database_url = direct_database_url or database_url
        self._database = Database(self._database_url, pool_size=2)
        self.connections = Connections(
            database_url=database_url,
            broker_url=broker_url,
            jobs_address=f"{LOOPBACK}:{free_port()}",
            secret=secrets.token_hex(32),
        )
        self._extra: list[ServiceProcess] = []
        self.jobs = self.process("jobs", listen=self.connections.jobs_address)
        self.dispatcher = self.process("dispatcher")
        self.executor = self.process("executor")

    @property
    def processes(self) -> Sequence[ServiceProcess]:
        """The three."""
        return (self.jobs, self.dispatcher, self.executor)

    def process(self, name: str, *, log: str = "", listen: str = "", **environment: str) -> ServiceProcess:
        """Make a service, not started, with variables of its own."""
        service = next(service for service in AIJOBS.services if service.name == name)
        address = listen or f"{LOOPBACK}:{free_port()}"
        given = service_environment(service, listen=address, connections=self.connections, mint=mint_token)
        return ServiceProcess(
            log or name,
            arguments=service.arguments,
            address=address,
            environment=given | dict(self._environment) | environment,
            inherited=inherited_environment(),
            log=self._folder / f"{log or name}.log",
            lifeline=self._lifeline,
        )

    async def add(self, name: str, **environment: str) -> ServiceProcess:
        """Start one more executor or dispatcher; it ends with `heal` or `end`."""
        process = self.process(name, log=f"{name}-{len(self._extra) + 2}", **environment)
        self._extra.append(process)
        await process.start()
        return process

    def lend(self, process: ServiceProcess) -> None:
        """Let a process that was made by hand end with `heal` or `end`."""
        self._extra.append(process)

    async def migrate(self) -> None:
        """Bring the database up to date."""
        await upgrade_with(self._database_url)

    async def start(self) -> None:
        """Bring the database up to date and start all three at once."""
        await self.migrate()
        await asyncio.gather(*(process.start() for process in self.processes))

    async def heal(self) -> None:
        """Make it as new for the next test: the three run and answer, others are gone."""
        await asyncio.gather(*(process.kill() for process in self._extra))
        self._extra.clear()
        for process in self.processes:
            if process.pid is not None:
                process.thaw()
        await asyncio.gather(*(process.start() for process in self.processes if process.pid is None))
        await asyncio.gather(*(process.ready() for process in self.processes))
        for process in self.processes:
            # Written with O_APPEND, so it goes on at the beginning.
            process.log.write_bytes(b"")

    async def end(self) -> None:
        """End every process at once."""
        await asyncio.gather(*(process.kill() for process in (*self.processes, *self._extra)))
        self._lifeline.release()
        await self._database.close()

    def token(self, *roles: Role, subject: str = "shop") -> str:
        """Return a token."""
        return mint_token(self.connections.secret, subject=subject, roles=roles, lifetime=timedelta(hours=1))

    def client(self, *roles: Role, address: str = "", **options: Any) -> Client:
        """Return a client, a backend's if no roles are named; use it as a context manager."""
        return Client(address or self.connections.jobs_address, self.token(*roles or (Role.BACKEND,)), **options)

    async def create(self, job_type: str = "synthetic", **wanted: Any) -> str:
        """Create a job and return its id."""
        async with self.client() as client:
            answer = await client.create(job_type, user_id=USER, input=wanted)
        return answer.job.job_id

    async def ended(self, job_id: str, *, within: timedelta = WITHIN) -> job_pb2.Job:
        """Wait until a job has ended and return it in full."""
        await self.changes(job_id, within=within)
        async with self.client() as client:
            return await client.get(job_id, full=True)

    async def changes(self, job_id: str, *, upto: str = "", within: timedelta = WITHIN) -> list[job_pb2.Transition]:
        """Watch a job from its creation to its end, or to the first change of a kind, and return the changes."""
        seen = []
        async with (
            asyncio.timeout(within.total_seconds()),
            self.client() as client,
            aclosing(client.watch(job_id, after_sequence=0)) as updates,
        ):
            async for update in updates:
                if update.HasField("transition"):
                    seen.append(update.transition)
                    if update.transition.kind == upto:
                        break
        return seen

    async def read(self, table: Table, **equal: Any) -> list[RowMapping]:
        """Read rows of a table."""
        async with self._database.engine.connect() as connection:
            query = select(table).where(*(table.c[name] == value for name, value in equal.items()))
            return list((await connection.execute(query.order_by(*table.primary_key))).mappings())

    async def count(self, table: Table) -> int:
        """Count the rows of a table."""
        async with self._database.engine.connect() as connection:
            return int((await connection.execute(select(func.count()).select_from(table))).scalar_one())

    async def count_where(self, table: Table, **equal: Any) -> int:
        """Count the rows of a table that fit."""
        async with self._database.engine.connect() as connection:
            query = select(func.count()).select_from(table).where(*(table.c[k] == v for k, v in equal.items()))
            return int((await connection.execute(query)).scalar_one())

    async def execute(self, statement: Executable) -> None:
        """Write behind the back of the services."""
        async with self._database.engine.begin() as connection:
            await connection.execute(statement)

    async def server_connections(self) -> set[int]:
        """Return the ids of the services' connections, as the database's server counts them."""
        # This process's own are not among them.
        await self._database.engine.dispose()
        async with self._database.engine.connect() as connection:
            ids = await connection.exec_driver_sql(
                "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
            return set(ids.scalars())

    async def row(self, job_id: str) -> RowMapping:
        """Read the row of a job."""
        (row,) = await self.read(jobs, job_id=job_id)
        return row

    async def event_statuses(self, job_id: str) -> dict[str, str]:
        """Return the status of each of the job's outbox events by its type."""
        events = await self.read(outbox_events, aggregate_id=job_id)
        return {str(event["event_type"]): str(event["status"]) for event in events}

    async def until_event(self, job_id: str, status: str, event_type: str = "ai.job.enqueue") -> None:
        """Wait until an event of a job has a status."""

        async def reached() -> bool:
            return (await self.event_statuses(job_id)).get(event_type) == status

        await until(reached, f"{event_type} {status}")

    async def kinds(self, job_id: str) -> list[str]:
        """Return the kinds of a job's history entries, from the database."""
        return [str(entry["kind"]) for entry in await self.read(job_history, job_id=job_id)]

    async def require_run_once(self, job_id: str) -> None:
        """Check that a job succeeded, locked once, with one set of artifacts, and that its events are on their way."""
        job = await self.ended(job_id)
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job
        assert await self.kinds(job_id) == ["created", "locked", "succeeded"]
        assert len(await self.read(job_artifacts, job_id=job_id)) == job.artifact_count == 1
        await self.until_event(job_id, "published")
        await self.until_event(job_id, "published", "ai.job.completed")

    async def until_logged(self, process: ServiceProcess, text: str) -> None:
        """Wait for a text in the log of a service; `heal` empties it."""
        await until(lambda: lines_with(process.log, text), f"{text!r} in the log of {process.name}")


def lines_with(log: Path, text: str) -> list[str]:
    """Return the lines of a log with a text."""
    return [line for line in log.read_text().splitlines() if text in line] if log.exists() else []
