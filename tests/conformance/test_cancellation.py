"""LC-9: a cancel tells the truth, and tells it again when asked again."""

import pytest

from aijobs.errors import JobAlreadyCancelled, JobNotCancellable, JobNotFound, RequestIdReused
from aijobs.states import JobState
from services.jobs.cancellation import Cancel, CancelOutcome
from services.jobs.queries import Viewer
from tests.conformance.conftest import BACKEND, Jobs, failure, success


async def test_a_queued_job_is_cancelled_at_once(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    answer = await jobs.cancel(job_id)
    assert (answer.outcome, answer.job.lifecycle_status) == (CancelOutcome.CANCELLED, JobState.CANCELLED)
    assert {event.event_type for event in await jobs.claim()} == {"ai.job.enqueue", "ai.job.cancelled"}


async def test_a_running_job_is_asked_to_stop(jobs: Jobs) -> None:
    lease = await jobs.running()
    answer = await jobs.cancel(lease.job_id)
    assert (answer.outcome, answer.job.lifecycle_status) == (CancelOutcome.REQUESTED, JobState.RUNNING)
    assert answer.job.cancel_requested_at is not None
    again = await jobs.cancel(lease.job_id)
    assert again.outcome == CancelOutcome.REQUESTED
    assert await jobs.history(lease.job_id) == ["created", "locked", "cancel_requested"]


async def test_an_ended_job_is_not_cancellable(jobs: Jobs) -> None:
    succeeded, failed, cancelled = await jobs.running(), await jobs.running(), await jobs.create()
    await jobs.submit(succeeded, success())
    await jobs.submit(failed, failure("CREDENTIAL_MISSING"))
    await jobs.cancel(cancelled.job.job_id)
    with pytest.raises(JobNotCancellable, match="succeeded"):
        await jobs.cancel(succeeded.job_id)
    with pytest.raises(JobNotCancellable, match="failed"):
        await jobs.cancel(failed.job_id)
    with pytest.raises(JobAlreadyCancelled):
        await jobs.cancel(cancelled.job.job_id)


async def test_a_type_may_forbid_cancelling(jobs: Jobs) -> None:
    queued = (await jobs.create(job_type="fixed")).job.job_id
    running = (await jobs.running(job_type="fixed")).job_id
    for job_id in (queued, running):
        with pytest.raises(JobNotCancellable):
            await jobs.cancel(job_id)


async def test_a_repeat_gets_the_first_answer(jobs: Jobs) -> None:
    """Ruling 33: otherwise the repeat of a lost answer would say "already cancelled"."""
    queued, lease = (await jobs.create()).job.job_id, await jobs.running()
    assert (await jobs.cancel(queued, "r1")).outcome == CancelOutcome.CANCELLED
    assert (await jobs.cancel(queued, "r1")).outcome == CancelOutcome.CANCELLED
    assert (await jobs.cancel(lease.job_id, "r2")).outcome == CancelOutcome.REQUESTED
    assert (await jobs.cancel(lease.job_id, "r2")).outcome == CancelOutcome.REQUESTED


async def test_a_request_id_of_another_cancel_is_refused(jobs: Jobs) -> None:
    one, two = (await jobs.create()).job.job_id, (await jobs.create()).job.job_id
    await jobs.cancel(one, "r1")
    with pytest.raises(RequestIdReused):
        await jobs.cancel(two, "r1")


async def test_another_users_job_is_not_found(jobs: Jobs) -> None:
    job_id = (await jobs.create(user_id="alice")).job.job_id
    stranger = Viewer(caller="mallory", user_id="mallory")
    with pytest.raises(JobNotFound):
        await jobs.cancel(job_id, viewer=stranger)
    with pytest.raises(JobNotFound):
        await jobs.cancellation.cancel(stranger, Cancel(request_id="r", job_id="no-such-job", reason=""))
    assert (await jobs.queries.get(BACKEND, job_id, full=False)).job.lifecycle_status == JobState.QUEUED
