"""What a statement costs does not grow with the number of jobs: each has an index, and none sorts rows.

On MariaDB, with tables filled by SQL: most jobs have succeeded, some wait, a few run, and some leases have ended.
"""

import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text

from aijobs.states import JobState
from services.jobs.execution import Released
from services.jobs.migrate import upgrade_with
from services.jobs.outbox import Published, PublishFailed, SettleRequest
from services.jobs.queries import JobFilter
from services.jobs.quotas import Limits
from services.jobs.store import executors
from services.jobs.store import jobs as job_store
from services.jobs.store.database import Database
from services.jobs.store.outbox import EventStatus
from services.jobs.store.outbox_admin import EventFilter
from tests.conformance.conftest import BACKEND, Jobs, failure, hello, success

#: So few rows, however many jobs there are, that MariaDB reads them whole.
SMALL_TABLES = ("queues", "platform_switch")
RUNNING, WAITING, PUBLISHED = 500, 1000, 2000


async def fill(database: Database, count: int) -> None:
    """Store jobs of 1,000 users: `count` of them ended, besides those that wait and run."""
    jobs = (
        "INSERT INTO jobs (job_id, job_type, user_id, target_type, target_id, lifecycle_status, queue, priority,"
        " progress, labels_json, request_fingerprint, definition_version, cancellable, max_retries, backoff_ms,"
        " abort_strategy, retry_count, attempt, dispatch_no, sequence, lease_token, locked_by, locked_at, lock_until,"
        " created_at, started_at, finished_at, artifact_count, output_hash, output_json)"
        " SELECT CONCAT(LPAD(HEX(seq + {offset}), 8, '0'), '-0000-7000-8000-000000000000'),"
        " ELT(1 + seq % 3, 'testing', 'patient', 'fixed'), CONCAT('user-', seq % 1000), '', '', '{state}',"
        " ELT(1 + seq % 2, 'ai-interactive', 'ai-background'), 50, 0, '{{}}', REPEAT('0', 64), '1.0.0', 1, 2, 1000,"
        " 'fail', 0, 0, 1, 1, {token}, {holder}, {locked}, {until}, UTC_TIMESTAMP(6) - INTERVAL 1 HOUR, NULL,"
        " {finished}, 0, {hash}, {output} FROM seq_1_to_{count}"
    )
    event_rows = (
        "INSERT INTO outbox_events (event_id, event_type, aggregate_type, aggregate_id, dedupe_key, payload_json,"
        " queue, status, attempt_count, rank_at, created_at, settled_at)"
        " SELECT job_id, 'ai.job.enqueue', 'AiJob', job_id, CONCAT('ai.job.enqueue\\:', job_id, '\\:1'), '{{}}', queue,"
        " '{status}', 0, created_at, created_at, {published} FROM jobs WHERE lifecycle_status = '{state}' LIMIT {limit}"
    )
    none = {"token": "NULL", "holder": "NULL", "locked": "NULL", "until": "NULL", "finished": "NULL"}
    none |= {"hash": "NULL", "output": "NULL"}
    ended = {"finished": "UTC_TIMESTAMP(6)", "hash": "REPEAT('a', 64)", "output": "'{}'"}
    held = {
        "token": "REPEAT('t', 32)",
        "holder": "CONCAT('executor-', seq % 20)",
        "locked": "UTC_TIMESTAMP(6)",
        # One in ten has expired.
        "until": "UTC_TIMESTAMP(6) + INTERVAL IF(seq % 10, 60, -600) SECOND",
    }
    async with database.engine.begin() as connection:
        for state, size, values, offset in (
            ("succeeded", count, ended, 0),
            ("queued", WAITING, {}, 100_000_000),
            ("running", RUNNING, held, 200_000_000),
        ):
            await connection.execute(text(jobs.format(**none | values, state=state, count=size, offset=offset)))
        published: dict[str, Any] = {
            "status": "published",
            "published": "created_at",
            "state": "succeeded",
            "limit": count // 5,
        }
        pending: dict[str, Any] = {"status": "pending", "published": "NULL", "state": "queued", "limit": WAITING}
        for event_values in (published, pending):
            await connection.execute(text(event_rows.format(**event_values)))
        await connection.execute(
            text(
                "INSERT INTO job_history (job_id, sequence, kind, to_state, attempt, actor, reason, at)"
                " SELECT job_id, 1, 'created', 'queued', 0, 'caller:x', '', created_at FROM jobs"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO job_snapshots (job_id, schema_version, content_json, created_at)"
                " SELECT job_id, '1', '{}', created_at FROM jobs WHERE lifecycle_status <> 'succeeded'"
            )
        )
    async with database.engine.connect() as connection:
        await connection.execute(text("ANALYZE TABLE jobs, outbox_events, job_history, job_snapshots"))


@dataclass
class Statements:
    """Every statement with parameters that the engine executes, once each."""

    seen: dict[str, Any] = field(default_factory=dict)

    def listen(self, database: Database) -> None:
        @event.listens_for(database.engine.sync_engine, "before_cursor_execute")
        def note(_connection, _cursor, statement, parameters, _context, executemany) -> None:
            one = parameters[0] if executemany and isinstance(parameters, list) else parameters
            self.seen.setdefault(statement, one)


async def every_use(jobs: Jobs) -> None:
    """Do everything that happens to jobs while they live."""
    limited = Jobs(jobs.database, limits=Limits(live=100, daily=1000), opened=jobs.opened)
    for user in ("user-1", "somebody-new"):
        await limited.create(user_id=user, idempotency_key=uuid4().hex)
    lease = await jobs.running()
    await jobs.extend(lease, 10)
    await jobs.submit(lease, failure("PROVIDER_TIMEOUT"))
    await jobs.submit(lease, success())
    await jobs.submit(await jobs.running(), Released(reason="x"))
    await jobs.cancel((await jobs.create()).job.job_id)
    await jobs.cancel((await jobs.running()).job_id)
    token = uuid4().hex
    claimed = await jobs.claim(token, limit=5)
    await jobs.outbox.settle(token, [SettleRequest(event_id=e.event_id, result=Published()) for e in claimed])
    await jobs.claim_release.release_expired()
    await jobs.claim_release.release_orphaned()
    await jobs.claim_release.look_for_parked()
    await jobs.promotion.promote()
    await jobs.lapsing.reap()
    await jobs.sessions.open(hello("idle", free_slots=1, idle=timedelta(hours=1)))
    await jobs.reconciliation.sweep()
    await end_long_ago(jobs)
    await jobs.retention.prune()
    await jobs.database.read(lambda tx: executors.wishes(tx, ["executor-1", "executor-2"]))
    await jobs.database.read(lambda tx: executors.running_counts(tx, ["executor-1", "executor-2"]))
    await jobs.queries.get(BACKEND, lease.job_id, full=True)
    await jobs.queries.signs([lease.job_id])
    await jobs.queries.history(lease.job_id, after_sequence=0)
    for wanted in LISTS:
        await jobs.queries.page(BACKEND, wanted, size=50, token="")
    await every_use_of_operators(jobs)


async def every_use_of_operators(jobs: Jobs) -> None:
    """Do everything that operators do with events."""
    for wanted in EVENT_LISTS:
        for statuses in ((), (EventStatus.DEAD,), tuple(EventStatus)):
            page = await jobs.event_queries.page(wanted, statuses=statuses, size=5)
            await jobs.event_queries.page(wanted, statuses=statuses, token=page.next_page_token)
        await jobs.outbox_admin.requeue_dead("ops", wanted, dry_run=True)
    await jobs.event_queries.counts()
    await jobs.claim_release.look_for_dead()
    token = uuid4().hex
    ids = [event.event_id for event in await jobs.claim(token, limit=5)]
    dead = PublishFailed(reason="x", retryable=False)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event_id, result=dead) for event_id in ids])
    await jobs.outbox_admin.requeue("ops", ids)
    await jobs.outbox_admin.discard("ops", ids)
    assert (await jobs.consistency.check("ops", repair=False)).found


EVENT_LISTS = [
    EventFilter(),
    EventFilter(event_type="ai.job.enqueue"),
    EventFilter(queue="ai-interactive"),
    EventFilter(event_type="ai.job.enqueue", queue="ai-background"),
    EventFilter(job_id="00000001-0000-7000-8000-000000000000"),
    EventFilter(job_id="00000001-0000-7000-8000-000000000000", event_type="ai.job.enqueue", queue="ai-interactive"),
]


async def end_long_ago(jobs: Jobs) -> None:
    """Let a job be there that ended long ago, so that there is something to delete."""
    lease = await jobs.running()
    await jobs.submit(lease, success())
    async with jobs.database.engine.begin() as connection:
        for statement in (
            "UPDATE jobs SET finished_at = {past} WHERE job_id = '{job_id}'",
            "UPDATE job_snapshots SET created_at = {past} WHERE job_id = '{job_id}'",
            "UPDATE outbox_events SET status = 'published', settled_at = {past} WHERE aggregate_id = '{job_id}'",
        ):
            await connection.execute(
                text(statement.format(past="UTC_TIMESTAMP(6) - INTERVAL 31 DAY", job_id=lease.job_id))
            )


LISTS = [
    JobFilter(),
    JobFilter(user_id="user-1"),
    JobFilter(user_id="user-1", states=[JobState.QUEUED, JobState.RUNNING]),
    JobFilter(job_type="fixed"),
    JobFilter(job_type="no_such_type"),
    JobFilter(queue="no-such-queue"),
    JobFilter(states=[JobState.FAILED]),
    JobFilter(states=[JobState.QUEUED]),
]


async def bad_plans(database: Database, statements: Statements) -> list[str]:
    """Explain every statement and return those that read a whole table or sort."""
    bad = []
    async with database.engine.connect() as connection:
        for statement, parameters in list(statements.seen.items()):
            if not statement.startswith(("SELECT", "UPDATE", "DELETE")) or " FROM " not in statement + " FROM ":
                continue
            plan = (await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)).mappings().all()
            for row in plan:
                # What a limited part of a statement has found is as small as its limit.
                if row["table"] is None or row["table"] in SMALL_TABLES or row["table"].startswith("<"):
                    continue
                sorts = "filesort" in (row["Extra"] or "") or "temporary" in (row["Extra"] or "")
                # A list of everything reads the primary key from its end.
                whole = row["type"] == "ALL" or (row["type"] == "index" and "LIMIT" not in statement)
                if sorts or whole:
                    bad.append(f"{row['type']} {row['key']} {row['Extra']}: {statement}")
    return bad


@pytest.fixture
async def big(mariadb_url: str) -> AsyncIterator[Callable[[int], Awaitable[Jobs]]]:
    databases = []

    async def make(count: int) -> Jobs:
        await upgrade_with(mariadb_url)
        database = Database(mariadb_url)
        databases.append(database)
        await fill(database, count)
        return Jobs(database)

    yield make
    for database in databases:
        await database.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)])
async def test_every_hot_statement_uses_an_index_and_sorts_nothing(big, count: int) -> None:
    jobs = await big(count)
    statements = Statements()
    statements.listen(jobs.database)
    await every_use(jobs)
    assert len(statements.seen) > 40
    assert await bad_plans(jobs.database, statements) == []


def uses(jobs: Jobs) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Name what is measured."""
    found: dict[str, Callable[[], Awaitable[Any]]] = {
        "claim": lambda: jobs.claim(limit=10),
        "reap": lambda: jobs.database.read(
            lambda tx: job_store.expired_leases(tx, grace=timedelta(seconds=30), limit=100)
        ),
        "waiting": lambda: jobs.database.read(
            lambda tx: job_store.queued(tx, queue="ai-interactive", after=None, limit=100, since=timedelta(0))
        ),
    }
    for number, wanted in enumerate(LISTS):
        found[f"list {number}"] = partial(jobs.queries.page, BACKEND, wanted, size=50, token="")
    return found


async def milliseconds(use: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await use()
    return (time.perf_counter() - started) * 1000


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_million_jobs_cost_no_more_than_ten_thousand(mariadb_address, capsys) -> None:
    """Medians of turns taken by both, so that whatever else the machine does befalls both."""
    names = [f"test_{uuid4().hex}" for _ in range(2)]
    databases = []
    for name, count in zip(names, (10_000, 1_000_000), strict=True):
        url = await mariadb_address.create_database(name)
        await upgrade_with(url)
        databases.append(Database(url))
        await fill(databases[-1], count)
    measured: dict[str, tuple[float, float]] = {}
    few, many = (uses(Jobs(database)) for database in databases)
    for what in few:
        times = [(await milliseconds(few[what]), await milliseconds(many[what])) for _ in range(45)][5:]
        measured[what] = (statistics.median(pair[0] for pair in times), statistics.median(pair[1] for pair in times))
    for name, database in zip(names, databases, strict=True):
        await database.close()
        await mariadb_address.drop_database(name)
    with capsys.disabled():
        for what, (small, large) in measured.items():
            sys.stdout.write(f"\n{what}: {small:.2f} ms at 10,000 jobs, {large:.2f} ms at 1,000,000")
    assert {what: pair for what, pair in measured.items() if pair[1] > 2 * pair[0]} == {}
