"""The jobs service's use cases on a real database of each kind."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from sqlalchemy import RowMapping, Table, select
from sqlalchemy.ext.asyncio import AsyncConnection

from aijobs import canonical
from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema
from aijobs.errors import AijobsError
from aijobs.registry import Registry
from services.jobs.admission import NewJob
from services.jobs.business_rows import BusinessRows, RowWriter
from services.jobs.cancellation import Cancel, CancelAnswer, JobCancellation
from services.jobs.claim_release import ClaimRelease
from services.jobs.consistency import Consistency
from services.jobs.creation import Created, JobCreation
from services.jobs.event_queries import EventQueries
from services.jobs.execution import Accepted, Failed, JobExecution, Outcome
from services.jobs.follow_ups import FollowUpJobs
from services.jobs.lapsing import JobLapsing
from services.jobs.leasing import Extend, Extended, Holder, JobLeasing, Locked, LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.migrate import upgrade_with
from services.jobs.operating import Operating
from services.jobs.outbox import Claim, Outbox
from services.jobs.outbox_admin import OutboxAdmin
from services.jobs.projections import Projections
from services.jobs.promotion import Promotion
from services.jobs.queries import JobQueries, Viewer
from services.jobs.quotas import Limits, Quotas
from services.jobs.ranking import QueueOrder
from services.jobs.reconciliation import Reconciliation
from services.jobs.results import Succeeded
from services.jobs.retention import Ages, Retention
from services.jobs.retrying import JobRetrying
from services.jobs.sessions import ExecutorSessions, Session
from services.jobs.store.database import Database, Transaction
from services.jobs.store.executors import Hello, QueueLoad
from services.jobs.store.outbox import EventRow
from services.jobs.usage import UsageLedger
from services.jobs.wakeups import Signal, Wakeups
from services.jobs.watching import JobWatching

QUANTUM = timedelta(milliseconds=100)
BACKEND = Viewer(caller="backend", user_id=None)


class ObservedSignal(Signal):
    """A signal that tells when somebody starts to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def beyond(self, count: int, within: timedelta) -> bool:
        self.awaited.set()
        return await super().beyond(count, within)


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(default="", max_length=1_000_000)
    number: int = 0


class Output(BaseModel):
    text: str = ""


def definition(job_type: str = "testing", **execution: Any) -> JobDefinition:
    return JobDefinition(
        job_type=job_type,
        metadata=Metadata(label="Testing", description="For tests", domain="maintenance", version="1.0.0"),
        routing=Routing(queue=Queue.INTERACTIVE),
        execution=Execution(**{"timeout": timedelta(seconds=10), "max_retries": 2, **execution}),
        input=Schema(version="1", model=Input),
        output=Schema(version="1", model=Output),
        executor="module:execute",
    )


@dataclass
class Jobs:
    """The use cases of one jobs service, and short ways to call them."""

    database: Database
    lease_time: timedelta = timedelta(seconds=60)
    claim_time: timedelta = timedelta(seconds=60)
    lease_grace: timedelta = timedelta(seconds=30)
    session_grace: timedelta = timedelta(seconds=1)
    sweep_patience: timedelta = timedelta(seconds=10)
    most_takeovers: int = 3
    queue_depth: int = 1000
    dispatcher_grace: timedelta = timedelta(seconds=3)
    limits: Limits = field(default_factory=lambda: Limits(live=100))
    limits_by_type: Mapping[str, Limits] = field(default_factory=dict)
    order: QueueOrder = field(default_factory=lambda: QueueOrder(QUANTUM))
    wakeups: Wakeups = field(default_factory=Wakeups)
    writers: Mapping[str, RowWriter] = field(default_factory=dict)
    opened: dict[str, Session] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registry = Registry(
            [
                definition(),
                definition("fixed", cancellable=False),
                definition("patient", abort_strategy="retry"),
                definition("impatient", abort_strategy="fail"),
            ]
        )
        quotas = Quotas(self.limits, self.limits_by_type)
        self.creation = JobCreation(self.database, registry, self.wakeups, quotas, self.order)
        self.leasing = JobLeasing(self.database, self.wakeups, lease_time=self.lease_time, grace=self.lease_grace)
        follow_ups = FollowUpJobs(registry, self.wakeups, self.order)
        self.execution = JobExecution(self.database, self.wakeups, Projections(follow_ups, BusinessRows(self.writers)))
        self.cancellation = JobCancellation(self.database, self.wakeups)
        self.lapsing = JobLapsing(
            self.database,
            self.wakeups,
            most_takeovers=self.most_takeovers,
            grace=self.lease_grace,
            interval=timedelta(milliseconds=20),
        )
        self.sessions = ExecutorSessions(self.database, self.wakeups, self.lapsing, grace=self.session_grace)
        self.reconciliation = Reconciliation(
            self.database, self.wakeups, patience=self.sweep_patience, interval=timedelta(milliseconds=20)
        )
        self.retention = Retention(self.database, ages=Ages(), interval=timedelta(milliseconds=20), breath=timedelta(0))
        self.retrying = JobRetrying(self.database, registry, self.wakeups, self.order)
        self.operating = Operating(self.database, self.wakeups)
        self.queries = JobQueries(self.database)
        self.watching = JobWatching(self.queries, self.wakeups)
        self.ledger = UsageLedger(self.database)
        self.outbox = Outbox(self.database, self.wakeups, claim_time=self.claim_time, queue_depth=self.queue_depth)
        self.event_queries = EventQueries(self.database)
        self.claim_release = ClaimRelease(
            self.database,
            self.wakeups,
            self.event_queries,
            grace=self.dispatcher_grace,
            interval=timedelta(milliseconds=20),
        )
        self.outbox_admin = OutboxAdmin(self.database, self.wakeups)
        self.consistency = Consistency(
            self.database, self.reconciliation, self.lapsing, self.outbox_admin, self.event_queries
        )
        self.promotion = Promotion(self.database, self.wakeups, self.order)

    async def create(self, **changes: Any) -> Created:
        (created,) = await self.creation.create(changes.pop("caller", "backend"), [new_job(**changes)])
        assert isinstance(created, Created), created
        return created

    async def lock(self, job_id: str, token: str | None = None, executor_id: str = "executor-1") -> Locked:
        locked = await self.try_lock(job_id, token, executor_id)
        assert isinstance(locked, Locked), locked
        return locked

    async def try_lock(
        self, job_id: str, token: str | None = None, executor_id: str = "executor-1"
    ) -> Locked | AijobsError:
        holder = await self.holder(executor_id)
        (result,) = await self.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token=token or uuid4().hex)])
        return result

    async def holder(self, executor_id: str = "executor-1") -> Holder:
        """Return an executor that has said hello, once."""
        if executor_id not in self.opened:
            self.opened[executor_id] = await self.sessions.open(hello(executor_id))
        return Holder(executor_id=executor_id, session_epoch=self.opened[executor_id].epoch)

    async def running(self, **changes: Any) -> Lease:
        created = await self.create(**changes)
        return lease_of(await self.lock(created.job.job_id))

    async def submit(self, lease: Lease, report: Any, executor_id: str = "executor-1") -> Accepted | AijobsError:
        (result,) = await self.execution.submit(executor_id, [Outcome(lease=lease, report=report)])
        return result

    async def extend(
        self, lease: Lease, progress: int | None = None, executor_id: str = "executor-1"
    ) -> Extended | AijobsError:
        (result,) = await self.leasing.extend(executor_id, [Extend(lease=lease, progress=progress)])
        return result

    async def cancel(self, job_id: str, request_id: str | None = None, viewer: Viewer = BACKEND) -> CancelAnswer:
        return await self.cancellation.cancel(
            viewer, Cancel(request_id=request_id or uuid4().hex, job_id=job_id, reason="")
        )

    async def claim(
        self, token: str | None = None, limit: int = 10, wait: timedelta = timedelta(0), **changes: Any
    ) -> list[EventRow]:
        claim = Claim(
            **{
                "token": token or uuid4().hex,
                "dispatcher_id": "dispatcher-1",
                "event_types": ["ai.job.enqueue", "ai.job.completed", "ai.job.failed", "ai.job.cancelled"],
                "ready": {},
                "limit": limit,
                "wait": wait,
                **changes,
            }
        )
        return list(await self.outbox.claim(claim))

    async def rows(self, table: Table, *order: str) -> list[RowMapping]:
        """Read a whole table."""

        async def work(tx: Transaction) -> list[RowMapping]:
            result = await tx.execute(select(table).order_by(*(table.c[name] for name in order)))
            return list(result.mappings())

        return await self.database.read(work)

    async def history(self, job_id: str) -> list[str]:
        return [str(entry.kind) for entry in await self.queries.history(job_id, after_sequence=0)]


HELLOS = count(1)


def hello(executor_id: str, *job_types: str, free_slots: int = 0, idle: timedelta = timedelta(0)) -> Hello:
    """Introduce an executor, with a higher number each time."""
    return Hello(
        executor_id=executor_id,
        hello_no=next(HELLOS),
        version="1.0.0",
        job_types=job_types or ("testing", "fixed", "patient", "impatient"),
        queues=[QueueLoad(queue="ai-interactive", slots=2, free_slots=free_slots, idle=idle)],
    )


def new_job(**changes: Any) -> NewJob:
    return NewJob(
        **{
            "request_id": uuid4().hex,
            "user_id": "user-1",
            "job_type": "testing",
            "target_type": "",
            "target_id": "",
            "input": {"text": "hello"},
            "input_size": 16,
            "idempotency_key": None,
            "strict_idempotency": False,
            "labels": {},
            "priority": None,
            **changes,
        }
    )


def lease_of(locked: Locked) -> Lease:
    assert locked.job.lease_token is not None
    return Lease(job_id=locked.job.job_id, attempt=locked.job.attempt, lease_token=locked.job.lease_token)


def success(output: JsonValue = None, artifacts: Any = ()) -> Succeeded:
    text = canonical.dump({"text": "done"} if output is None else output)
    return Succeeded(output_json=text, output_hash=canonical.digest(text), artifacts=artifacts)


def failure(code: str, execution: int = 1, feedback: str = "") -> Failed:
    return Failed(execution=execution, code=code, internal="for operators", feedback=feedback)


@pytest.fixture(params=["sqlite", "mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    url: str = request.getfixturevalue("mariadb_url")
    return url


#: What the migrations have made, once for each kind of database: to copy it is quicker than to migrate again.
MIGRATED: dict[str, list[str]] = {}


async def migrate_by_copy(database_url: str) -> None:
    """Bring an empty database to the present schema, by the statements that the migrated one is made of."""
    kind = database_url.partition("+")[0]
    if kind not in MIGRATED:
        await upgrade_with(database_url)
    database = Database(database_url, pool_size=1)
    async with database.engine.begin() as connection:
        if kind in MIGRATED:
            # In any order: tables refer to each other.
            await connection.exec_driver_sql(
                "PRAGMA defer_foreign_keys = ON" if database.sqlite else "SET foreign_key_checks = 0"
            )
            for statement in MIGRATED[kind]:
                await connection.exec_driver_sql(statement)
        else:
            MIGRATED[kind] = await _statements(connection, sqlite=database.sqlite)
    await database.close()


async def _statements(connection: AsyncConnection, *, sqlite: bool) -> list[str]:
    (revision,) = (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalars()
    if sqlite:
        made = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY type DESC"
        statements = (await connection.exec_driver_sql(made)).scalars().all()
    else:
        tables = (await connection.exec_driver_sql("SHOW TABLES")).scalars().all()
        created = [await connection.exec_driver_sql(f"SHOW CREATE TABLE `{table}`") for table in tables]
        statements = [result.mappings().one()["Create Table"] for result in created]
    return [*statements, f"INSERT INTO alembic_version VALUES ('{revision}')"]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    await migrate_by_copy(database_url)
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)
