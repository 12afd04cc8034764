"""Retrying by hand makes a new job and leaves the old one as it is (LC-10, ruling 19)."""

import asyncio

import pytest
from sqlalchemy import delete

from aijobs.errors import (
    JobNotFound,
    JobNotRetryable,
    RequestIdReused,
    RetryInProgress,
    SnapshotExpired,
    UnknownJobType,
)
from aijobs.registry import Registry
from services.jobs.quotas import Limits
from services.jobs.retrying import JobRetrying, Retry
from services.jobs.store.jobs import JobRow
from services.jobs.store.tables import job_snapshots, outbox_events
from services.jobs.store.tables import jobs as jobs_table
from tests.conformance.conftest import BACKEND, Jobs, failure, lease_of, success


async def failed(jobs: Jobs, **changes: object) -> str:
    lease = await jobs.running(**changes)
    await jobs.submit(lease, failure("CREDENTIAL_MISSING"))
    return lease.job_id


async def retry(jobs: Jobs, job_id: str, request_id: str = "r1", reason: str = "") -> JobRow:
    return await jobs.retrying.retry("ops", Retry(request_id=request_id, job_id=job_id, reason=reason))


async def test_a_failed_job_is_retried_as_a_new_job_with_its_input(jobs: Jobs) -> None:
    job_id = await failed(jobs, labels={"a": "b"}, priority=7, input={"text": "again"}, target_type="t", target_id="1")
    (before,) = await jobs.rows(jobs_table)
    new = await retry(jobs, job_id, reason="key renewed")
    assert (new.retry_of, new.root_job_id, new.idempotency_key) == (job_id, job_id, f"retry:{job_id}:1")
    assert (new.priority, new.labels_json, new.target_id, new.lifecycle_status) == (7, '{"a":"b"}', "1", "queued")
    (entry,) = await jobs.queries.history(new.job_id, after_sequence=0)
    assert (entry.kind, entry.actor, entry.reason) == ("retried", "caller:ops", f"retry of {job_id}: key renewed")
    assert [row for row in await jobs.rows(jobs_table) if row["job_id"] == job_id] == [before]
    locked = await jobs.lock(new.job_id)
    assert locked.snapshot.content_json == '{"number":0,"text":"again"}'
    await jobs.submit(lease_of(locked), success())


async def test_a_cancelled_job_can_be_retried_too(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    await jobs.cancel(job_id)
    assert (await retry(jobs, job_id)).retry_of == job_id


async def test_only_one_retry_is_alive_at_a_time_also_when_many_ask_at_once(jobs: Jobs) -> None:
    job_id = await failed(jobs)
    results = await asyncio.gather(*(retry(jobs, job_id, f"r{n}") for n in range(10)), return_exceptions=True)
    (new,) = [result for result in results if isinstance(result, JobRow)]
    refusals = [result for result in results if isinstance(result, RetryInProgress)]
    assert len(refusals) == 9
    assert all(new.job_id in refusal.message for refusal in refusals)
    await jobs.submit(lease_of(await jobs.lock(new.job_id)), failure("CREDENTIAL_MISSING"))
    second = await retry(jobs, job_id, "r-next")
    assert (second.idempotency_key, second.root_job_id) == (f"retry:{job_id}:2", job_id)


async def test_a_retry_of_a_retry_names_the_first_job_as_its_root(jobs: Jobs) -> None:
    job_id = await failed(jobs)
    first = await retry(jobs, job_id)
    await jobs.cancel(first.job_id)
    second = await retry(jobs, first.job_id, "r2")
    assert (second.retry_of, second.root_job_id) == (first.job_id, job_id)


async def test_a_repeated_request_gets_the_same_job(jobs: Jobs) -> None:
    job_id = await failed(jobs)
    first = await retry(jobs, job_id)
    await jobs.cancel(first.job_id)
    assert (await retry(jobs, job_id)).job_id == first.job_id
    with pytest.raises(RequestIdReused):
        await retry(jobs, job_id, reason="other words")
    assert len([row for row in await jobs.rows(outbox_events) if row["aggregate_id"] == first.job_id]) == 2


async def test_jobs_that_wait_run_or_succeeded_are_not_retried(jobs: Jobs) -> None:
    waiting = (await jobs.create()).job.job_id
    running = await jobs.running()
    done = await jobs.running()
    await jobs.submit(done, success())
    for job_id in (waiting, running.job_id, done.job_id):
        with pytest.raises(JobNotRetryable):
            await retry(jobs, job_id)
    with pytest.raises(JobNotFound):
        await retry(jobs, "01890a5d-ac96-774b-bcce-b302099a8057")


async def test_a_job_whose_input_is_gone_is_not_retried(jobs: Jobs) -> None:
    job_id = await failed(jobs)
    await jobs.database.write(lambda tx: tx.execute(delete(job_snapshots)))
    with pytest.raises(SnapshotExpired):
        await retry(jobs, job_id)


async def test_a_key_that_looks_like_ours_is_in_nobodys_way(jobs: Jobs) -> None:
    job_id = await failed(jobs)
    await jobs.create(idempotency_key=f"retry:{job_id}:1")
    assert (await retry(jobs, job_id)).idempotency_key == f"retry:{job_id}:2"


async def test_a_retry_is_refused_by_no_limit_of_the_user(jobs: Jobs) -> None:
    few = Jobs(jobs.database, limits=Limits(live=1))
    job_id = await failed(few)
    await few.create()
    new = await retry(few, job_id)
    assert (await few.queries.get(BACKEND, new.job_id, full=False)).job.lifecycle_status == "queued"


async def test_a_job_whose_type_is_no_longer_installed_is_not_retried(jobs: Jobs) -> None:
    """No executor could ever run it."""
    job_id = await failed(jobs)
    gone = JobRetrying(jobs.database, Registry([]), jobs.wakeups, jobs.order)
    with pytest.raises(UnknownJobType):
        await gone.retry("ops", Retry(request_id="r1", job_id=job_id, reason=""))
