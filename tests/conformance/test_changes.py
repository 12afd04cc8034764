"""LC-2, LC-5: the database itself refuses a change whose job is not as it was read, whatever was decided in memory."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from aijobs.states import JobState
from services.jobs import lifecycle
from services.jobs.lifecycle import Lease
from services.jobs.store import changes, outbox
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change, StaleChange
from services.jobs.store.jobs import JobRow, Renewal
from services.jobs.store.outbox import EventStatus, Settlement
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import BACKEND, Jobs


def cancelled(job: JobRow) -> Change:
    return lifecycle.cancel_waiting(job, actor="caller:test", reason="")


def succeeded(job: JobRow) -> Change:
    lease = Lease(job_id=job.job_id, attempt=job.attempt, lease_token=job.lease_token or "")
    return lifecycle.succeed(job, lease, output_json="null", output_hash="0" * 64, artifact_count=0)


async def running(jobs: Jobs) -> JobRow:
    lease = await jobs.running()
    return (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job


async def test_a_change_of_the_row_as_it_is_is_written(jobs: Jobs) -> None:
    job = await running(jobs)
    await jobs.database.write(lambda tx: changes.apply(tx, [succeeded(job)]))
    assert await jobs.history(job.job_id) == ["created", "locked", "succeeded"]


@pytest.mark.parametrize(
    ("stale", "change"),
    [
        (lambda job: replace(job, lifecycle_status=JobState.QUEUED), cancelled),
        (lambda job: replace(job, sequence=job.sequence - 1), succeeded),
        (lambda job: replace(job, attempt=job.attempt + 1), succeeded),
        (lambda job: replace(job, lease_token="x" * 32), succeeded),
    ],
    ids=["state", "sequence", "attempt", "lease token"],
)
async def test_a_change_of_another_row_than_the_present_one_is_refused(
    jobs: Jobs, stale: Callable[[JobRow], JobRow], change: Callable[[JobRow], Change]
) -> None:
    job = await running(jobs)
    with pytest.raises(StaleChange):
        await jobs.database.write(lambda tx: changes.apply(tx, [change(stale(job))]))
    assert (await jobs.queries.get(BACKEND, job.job_id, full=False)).job.lifecycle_status == JobState.RUNNING
    assert await jobs.history(job.job_id) == ["created", "locked"]


@pytest.mark.parametrize(("attempt", "lease_token", "extended"), [(0, "", 1), (1, "", 0), (0, "x", 0)])
async def test_a_lease_is_extended_by_its_whole_fence_only(
    jobs: Jobs, attempt: int, lease_token: str, extended: int
) -> None:
    """LC-6; what is off is added to the true attempt and token."""
    lease = await jobs.running()
    renewal = Renewal(
        job_id=lease.job_id,
        attempt=lease.attempt + attempt,
        lease_token=lease.lease_token + lease_token,
        progress=50,
    )
    written = await jobs.database.write(lambda tx: job_store.extend(tx, [renewal], timedelta(seconds=60)))
    assert written == extended
    assert (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job.progress == 50 * extended


@pytest.mark.parametrize("mine", [True, False])
async def test_an_event_is_settled_by_the_claim_that_holds_it_only(jobs: Jobs, mine: bool) -> None:
    """OB-2."""
    await jobs.create()
    token = uuid4().hex
    (event,) = await jobs.claim(token)
    settlement = Settlement(event_id=event.event_id, status=EventStatus.PUBLISHED, attempt_count=0, last_error=None)
    by = token if mine else uuid4().hex
    await jobs.database.write(lambda tx: outbox.settle(tx, by, [settlement]))
    (row,) = await jobs.rows(outbox_events, "id")
    assert row["status"] == (EventStatus.PUBLISHED if mine else EventStatus.PROCESSING)
