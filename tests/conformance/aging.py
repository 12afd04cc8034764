"""Jobs that ended long ago, and what is left of them."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from aijobs.states import JobState
from services.jobs.execution import Released
from services.jobs.outbox import Published, PublishFailed, SettleRequest
from services.jobs.retention import Ages, Retention
from services.jobs.retrying import Retry
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.tables import job_artifacts, job_history, job_snapshots, outbox_events, requests
from services.jobs.store.tables import jobs as jobs_table
from tests.conformance.conftest import Jobs, failure, success

DAY = timedelta(days=1)
ZERO = timedelta(0)
OF_JOBS = (jobs_table, job_snapshots, job_artifacts, job_history, requests, outbox_events)


def retention(jobs: Jobs, **ages: Any) -> Retention:
    return Retention(jobs.database, ages=Ages(**ages), interval=timedelta(milliseconds=20), breath=ZERO)


async def age(jobs: Jobs, span: timedelta) -> None:
    """Let time pass for everything that is stored."""
    columns = {
        "jobs": ("created_at", "finished_at", "lapsed_at", "due_at"),
        "job_snapshots": ("created_at",),
        "outbox_events": ("created_at", "settled_at"),
    }
    seconds = int(span.total_seconds())

    async def work(tx: Transaction) -> None:
        for table, names in columns.items():
            for name in names:
                past = f"{name} - {seconds * 1_000_000}" if tx.sqlite else f"{name} - INTERVAL {seconds} SECOND"
                await tx.execute(text(f"UPDATE {table} SET {name} = {past}"))

    await jobs.database.write(work)


async def publish(jobs: Jobs) -> None:
    token = uuid4().hex
    while claimed := await jobs.claim(token, limit=100):
        await jobs.outbox.settle(token, [SettleRequest(event_id=e.event_id, result=Published()) for e in claimed])
        token = uuid4().hex


async def kill_event(jobs: Jobs) -> None:
    """Let the one event that is there be refused for good."""
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    dead = PublishFailed(reason="DISPATCH_REFUSED", retryable=False)
    await jobs.outbox.settle(token, [SettleRequest(event_id=event.event_id, result=dead)])


async def events(jobs: Jobs) -> list[str]:
    """Return type, dispatch number and status of each event."""
    rows = await jobs.rows(outbox_events, "id")
    return [f"{row['event_type'][7:]} {row['dedupe_key'].rpartition(':')[2]} {row['status']}" for row in rows]


async def ids(jobs: Jobs) -> set[str]:
    return {row["job_id"] for row in await jobs.rows(jobs_table)}


async def ended(jobs: Jobs, state: JobState = JobState.SUCCEEDED, **changes: Any) -> str:
    """Run a job to its end and tell of it."""
    lease = await jobs.running(**changes)
    match state:
        case JobState.FAILED:
            await jobs.submit(lease, failure("CREDENTIAL_MISSING"))
        case JobState.CANCELLED:
            await jobs.submit(lease, Released(reason="x"))
            await jobs.cancel(lease.job_id)
        case _:
            artifact = ArtifactRow(
                job_id=lease.job_id, artifact_type="a", artifact_id=str(uuid4()), ordinal=0, content_json="{}"
            )
            await jobs.submit(lease, success(artifacts=[artifact]))
    await publish(jobs)
    return lease.job_id


async def retry(jobs: Jobs, job_id: str, request_id: str = "") -> JobRow:
    return await jobs.retrying.retry("ops", Retry(request_id=request_id or uuid4().hex, job_id=job_id, reason=""))


async def counts(jobs: Jobs) -> Mapping[str, int]:
    return {table.name: len(await jobs.rows(table)) for table in OF_JOBS}
