"""LC-2, LC-4, LC-5, EX-2, PJ-2, PJ-3: who may write what about a run, and how often it counts."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import update

from aijobs import canonical
from aijobs.errors import (
    AijobsError,
    CancelRequested,
    IllegalTransition,
    InvalidInput,
    JobNotFound,
    LeaseConflict,
    LeaseLost,
    NotAttempted,
)
from aijobs.registry import Registry
from aijobs.states import JobState
from services.jobs.business_rows import BusinessRows
from services.jobs.creation import Created
from services.jobs.execution import Accepted, Cancelled, JobExecution, Outcome, Released
from services.jobs.follow_ups import FollowUpJobs
from services.jobs.leasing import Extend, Extended, Locked, LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.projections import Projections
from services.jobs.results import Succeeded
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.database import Transaction
from services.jobs.store.tables import job_artifacts, outbox_events
from services.jobs.store.tables import jobs as job_table
from services.jobs.store.time import now_plus
from tests.conformance.conftest import BACKEND, Jobs, failure, lease_of, new_job, success


async def state(service: Jobs, job_id: str) -> JobState:
    return (await service.queries.get(BACKEND, job_id, full=False)).job.lifecycle_status


def text_as_it_is(text: str) -> Succeeded:
    return Succeeded(output_json=text, output_hash=canonical.digest(text), artifacts=[])


def artifact(job_id: str, ordinal: int = 0, content: str = "{}") -> ArtifactRow:
    return ArtifactRow(
        job_id=job_id, artifact_type="text", artifact_id=f"id-{ordinal}", ordinal=ordinal, content_json=content
    )


async def test_a_lock_hands_out_the_lease_and_what_a_run_needs(jobs: Jobs) -> None:
    created = await jobs.create(input={"text": "do it"})
    locked = await jobs.lock(created.job.job_id, token="t" * 32)
    job = locked.job
    assert (job.lifecycle_status, job.attempt, job.lease_token, job.locked_by) == (
        JobState.RUNNING,
        1,
        "t" * 32,
        "executor-1",
    )
    assert timedelta(seconds=55) < locked.remaining <= timedelta(seconds=60)
    assert locked.snapshot.content_json == '{"number":0,"text":"do it"}'
    assert job.started_at is not None


async def test_of_many_lockers_exactly_one_wins(jobs: Jobs) -> None:
    for _ in range(5):
        job_id = (await jobs.create()).job.job_id
        results = await asyncio.gather(*(jobs.try_lock(job_id, executor_id=f"executor-{n}") for n in range(16)))
        assert sum(isinstance(result, Locked) for result in results) == 1
        assert sum(isinstance(result, LeaseConflict) for result in results) == 15


async def test_a_repeated_lock_gets_the_same_lease(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    first = await jobs.lock(job_id, token="t" * 32)
    again = await jobs.lock(job_id, token="t" * 32)
    assert lease_of(again) == lease_of(first)
    assert await jobs.history(job_id) == ["created", "locked"]


async def test_a_lock_is_refused_with_the_reason(jobs: Jobs) -> None:
    assert isinstance(await jobs.try_lock(str(uuid4())), JobNotFound)
    lease = await jobs.running()
    assert isinstance(await jobs.try_lock(lease.job_id), LeaseConflict)
    await jobs.submit(lease, success())
    refusal = await jobs.try_lock(lease.job_id)
    assert isinstance(refusal, IllegalTransition)
    assert "succeeded" in refusal.message
    assert "running" in refusal.message


async def test_a_batch_of_locks_answers_each_by_itself(jobs: Jobs) -> None:
    free = (await jobs.create()).job.job_id
    taken = (await jobs.running()).job_id
    items = [
        LockRequest(job_id=taken, lease_token="a" * 32),
        LockRequest(job_id=free, lease_token="b" * 32),
        LockRequest(job_id=str(uuid4()), lease_token="c" * 32),
        LockRequest(job_id=free, lease_token="d" * 32),
        LockRequest(job_id=free, lease_token="b" * 32),
    ]
    results = await jobs.leasing.lock(await jobs.holder("executor-1"), items)
    assert [type(result) for result in results] == [LeaseConflict, Locked, JobNotFound, LeaseConflict, Locked]


async def test_a_success_commits_output_artifacts_history_and_event_together(jobs: Jobs) -> None:
    lease = await jobs.running()
    report = success({"text": "ü"}, [artifact(lease.job_id), artifact(lease.job_id, 1)])
    accepted = await jobs.submit(lease, report)
    assert isinstance(accepted, Accepted)
    detail = await jobs.queries.get(BACKEND, lease.job_id, full=True)
    assert detail.output_json == '{"text":"ü"}'
    assert detail.job.output_hash == canonical.digest('{"text":"ü"}')
    assert [a.artifact_id for a in detail.artifacts] == ["id-0", "id-1"]
    assert (detail.job.artifact_count, detail.job.progress, detail.job.lease_token) == (2, 100, None)
    assert await jobs.history(lease.job_id) == ["created", "locked", "succeeded"]
    assert [event["event_type"] for event in await jobs.rows(outbox_events, "id")] == [
        "ai.job.enqueue",
        "ai.job.completed",
    ]


async def test_a_result_that_breaks_a_constraint_leaves_nothing(jobs: Jobs, monkeypatch) -> None:
    """PJ-2: the projection fails, so there is no success either, and the run goes on."""
    lease = await jobs.running()
    monkeypatch.setattr("services.jobs.results.artifact_violations", lambda *_: [])
    twice = [artifact(lease.job_id), artifact(lease.job_id)]
    result = await jobs.submit(lease, success(artifacts=twice))
    assert isinstance(result, AijobsError)
    assert await state(jobs, lease.job_id) == JobState.RUNNING
    assert await jobs.rows(job_artifacts) == []
    assert isinstance(await jobs.submit(lease, success()), Accepted)


async def test_a_bad_item_of_a_batch_harms_only_itself(jobs: Jobs, monkeypatch) -> None:
    leases = [await jobs.running() for _ in range(3)]
    monkeypatch.setattr("services.jobs.results.artifact_violations", lambda *_: [])
    bad = [artifact(leases[1].job_id), artifact(leases[1].job_id)]
    results = await jobs.execution.submit(
        "executor-1",
        [
            Outcome(lease=lease, report=success(artifacts=bad if index == 1 else ()))
            for index, lease in enumerate(leases)
        ],
    )
    assert [isinstance(result, Accepted) for result in results] == [True, False, True]
    assert [await state(jobs, lease.job_id) for lease in leases] == [
        JobState.SUCCEEDED,
        JobState.RUNNING,
        JobState.SUCCEEDED,
    ]


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (Succeeded(output_json="{}", output_hash="0" * 64, artifacts=[]), "succeeded.output_hash"),
        (text_as_it_is('{"b":1, "a":2}'), "succeeded.output_json"),
        (text_as_it_is('{"a":NaN}'), "succeeded.output_json"),
        (success({"text": "x" * (2 * 1024 * 1024)}), "succeeded"),
    ],
)
async def test_a_result_that_could_not_be_given_back_is_refused(jobs: Jobs, report: Succeeded, field: str) -> None:
    lease = await jobs.running()
    refusal = await jobs.submit(lease, report)
    assert isinstance(refusal, InvalidInput)
    assert [violation.field for violation in refusal.violations] == [field]
    assert await state(jobs, lease.job_id) == JobState.RUNNING


async def test_bad_artifacts_are_refused_by_name(jobs: Jobs) -> None:
    lease = await jobs.running()
    bad = [artifact(lease.job_id), artifact(lease.job_id), artifact(lease.job_id, 2, "{"), artifact("another-job", 3)]
    refusal = await jobs.submit(lease, success(artifacts=bad))
    assert isinstance(refusal, InvalidInput)
    assert {violation.field for violation in refusal.violations} == {
        "succeeded.projection.artifacts[1]",
        "succeeded.projection.artifacts[2].content_json",
        "succeeded.projection.artifacts[3]",
    }


async def test_everything_in_a_lock_answer_counts_against_its_size(jobs: Jobs) -> None:
    """Labels too, and the same job asked for several times."""
    labels = {f"label-{number}": "ü" * 256 for number in range(16)}
    batch = [new_job(user_id=f"user-{n}", labels=labels, input={"text": "x" * 29_000}) for n in range(100)]
    created = await jobs.creation.create("backend", batch)
    ids = [item.job.job_id for item in created if isinstance(item, Created)]
    results = await jobs.leasing.lock(
        await jobs.holder("executor-1"), [LockRequest(job_id=id_, lease_token="t" * 32) for id_ in ids]
    )
    granted = [result for result in results if isinstance(result, Locked)]
    size = sum(len(item.snapshot.content_json) + len(item.job.labels_json.encode()) for item in granted)
    assert 2_500_000 < size < 3 * 1024 * 1024
    large = (await jobs.create(input={"text": "x" * 900_000})).job.job_id
    again = await jobs.leasing.lock(
        await jobs.holder("executor-1"), [LockRequest(job_id=large, lease_token="t" * 32)] * 6
    )
    assert [type(result) for result in again] == [Locked] * 3 + [NotAttempted] * 3


async def test_a_repeated_report_gets_the_first_answer_and_has_one_effect(jobs: Jobs) -> None:
    lease = await jobs.running()
    first = await jobs.submit(lease, success(artifacts=[artifact(lease.job_id)]))
    again = await jobs.submit(lease, success(artifacts=[artifact(lease.job_id)]))
    assert isinstance(first, Accepted)
    assert isinstance(again, Accepted)
    assert again.job.sequence == first.job.sequence
    assert len(await jobs.rows(job_artifacts)) == 1
    assert len(await jobs.rows(outbox_events, "id")) == 2


async def test_a_second_report_with_another_output_is_refused(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, success({"text": "one"}))
    assert isinstance(await jobs.submit(lease, success({"text": "two"})), LeaseLost)
    assert (await jobs.queries.get(BACKEND, lease.job_id, full=True)).output_json == '{"text":"one"}'


@pytest.mark.parametrize("stale", [{"attempt": 2}, {"lease_token": "z" * 32}])
async def test_a_stale_lease_changes_nothing(jobs: Jobs, stale) -> None:
    """LC-5: every report carries the fence."""
    good = await jobs.running()
    lease = Lease(**{"job_id": good.job_id, "attempt": good.attempt, "lease_token": good.lease_token, **stale})
    for report in (success(), failure("PROVIDER_TIMEOUT"), failure("CREDENTIAL_MISSING"), Cancelled()):
        assert isinstance(await jobs.submit(lease, report), LeaseLost)
    (extended,) = await jobs.leasing.extend("executor-1", [Extend(lease=lease, progress=50)])
    assert isinstance(extended, LeaseLost)
    detail = await jobs.queries.get(BACKEND, good.job_id, full=False)
    assert (detail.job.lifecycle_status, detail.job.progress, detail.job.sequence) == (JobState.RUNNING, 0, 2)


async def test_a_failed_execution_is_counted_once_and_runs_again_after_a_growing_wait(jobs: Jobs) -> None:
    lease = await jobs.running()
    first = await jobs.submit(lease, failure("PROVIDER_TIMEOUT", 1))
    repeated = await jobs.submit(lease, failure("PROVIDER_TIMEOUT", 1))
    second = await jobs.submit(lease, failure("VALIDATION_SCHEMA", 2, feedback="score: too high"))
    assert isinstance(first, Accepted)
    assert isinstance(repeated, Accepted)
    assert isinstance(second, Accepted)
    assert [accepted.job.retry_count for accepted in (first, repeated, second)] == [1, 1, 2]
    assert [first.backoff, repeated.backoff, second.backoff] == [
        timedelta(seconds=2),
        timedelta(seconds=2),
        timedelta(seconds=4),
    ]
    last = await jobs.submit(lease, failure("PROVIDER_TIMEOUT", 3))
    assert isinstance(last, Accepted)
    assert (last.job.lifecycle_status, last.backoff, last.job.error_code) == (
        JobState.FAILED,
        None,
        "PROVIDER_TIMEOUT",
    )
    assert last.job.error_public == "The AI model is not available right now. Please try again later."
    assert await jobs.history(lease.job_id) == ["created", "locked", "execution_failed", "execution_failed", "failed"]


@pytest.mark.parametrize(
    ("job_type", "code", "states"),
    [
        ("testing", "PROVIDER_RATE_LIMITED", ["running", "running", "failed"]),
        ("testing", "VALIDATION_NOT_JSON", ["running", "running", "failed"]),
        ("testing", "INTERNAL_HANDLER_ERROR", ["running", "failed"]),
        ("testing", "SOMETHING_NEW", ["running", "failed"]),
        ("testing", "CREDENTIAL_REJECTED", ["failed"]),
        ("testing", "CONTENT_SAFETY_INPUT", ["failed"]),
        ("testing", "BUDGET_EXHAUSTED", ["failed"]),
        ("testing", "PROVIDER_REQUEST_REJECTED", ["failed"]),
        ("patient", "TIMEOUT", ["running", "running", "failed"]),
        ("impatient", "TIMEOUT", ["failed"]),
    ],
)
async def test_the_taxonomy_decides_how_often_a_failure_is_tried_again(
    jobs: Jobs, job_type: str, code: str, states: list[str]
) -> None:
    lease = await jobs.running(job_type=job_type)
    seen = []
    for execution in range(1, len(states) + 1):
        accepted = await jobs.submit(lease, failure(code, execution))
        assert isinstance(accepted, Accepted)
        seen.append(str(accepted.job.lifecycle_status))
        assert (accepted.backoff is not None) == (seen[-1] == "running")
    assert seen == states


async def test_earlier_errors_come_with_the_lease(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, failure("VALIDATION_SCHEMA", 1, feedback="score: too high"))
    again = await jobs.lock(lease.job_id, token=lease.lease_token)
    assert [(entry.reason, entry.feedback) for entry in again.earlier_errors] == [
        ("VALIDATION_SCHEMA", "score: too high")
    ]


async def test_a_heartbeat_extends_and_carries_progress(jobs: Jobs) -> None:
    lease = await jobs.running()
    (extended,) = await jobs.leasing.extend("executor-1", [Extend(lease=lease, progress=42)])
    assert extended == Extended(
        remaining=timedelta(seconds=60), abort_after=timedelta(seconds=80), cancel_requested=False
    )
    (extended,) = await jobs.leasing.extend("executor-1", [Extend(lease=lease, progress=None)])
    assert isinstance(extended, Extended)
    assert (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job.progress == 42


async def test_a_batch_of_heartbeats_answers_each_by_itself(jobs: Jobs) -> None:
    leases = [await jobs.running() for _ in range(3)]
    await jobs.cancel(leases[1].job_id)
    stale = Lease(job_id=leases[2].job_id, attempt=9, lease_token=leases[2].lease_token)
    results = await jobs.leasing.extend(
        "executor-1",
        [
            Extend(lease=lease, progress=progress)
            for lease, progress in ((leases[0], 10), (leases[1], None), (stale, 30))
        ],
    )
    assert isinstance(results[0], Extended)
    assert isinstance(results[1], Extended)
    assert [results[0].cancel_requested, results[1].cancel_requested] == [False, True]
    assert isinstance(results[2], LeaseLost)


async def test_after_a_cancel_request_result_and_failure_are_refused_and_the_run_ends_cancelled(jobs: Jobs) -> None:
    """LC-9: an acknowledged cancel never succeeds."""
    lease = await jobs.running()
    await jobs.cancel(lease.job_id)
    assert isinstance(await jobs.submit(lease, success(artifacts=[artifact(lease.job_id)])), CancelRequested)
    assert isinstance(await jobs.submit(lease, failure("PROVIDER_TIMEOUT")), CancelRequested)
    assert isinstance(await jobs.submit(lease, failure("CREDENTIAL_MISSING")), CancelRequested)
    first = await jobs.submit(lease, Cancelled())
    again = await jobs.submit(lease, Cancelled())
    assert isinstance(first, Accepted)
    assert isinstance(again, Accepted)
    assert first.job.lifecycle_status == JobState.CANCELLED
    assert await jobs.rows(job_artifacts) == []
    assert await jobs.history(lease.job_id) == ["created", "locked", "cancel_requested", "cancelled"]


async def test_a_run_that_nobody_cancelled_cannot_end_cancelled(jobs: Jobs) -> None:
    lease = await jobs.running()
    assert isinstance(await jobs.submit(lease, Cancelled()), IllegalTransition)
    assert await state(jobs, lease.job_id) == JobState.RUNNING


async def test_cancel_and_success_at_once_agree(jobs: Jobs) -> None:
    """Case L3 in short: whatever wins, both answers are true."""
    for _ in range(20):
        lease = await jobs.running()

        async def cancel(job_id: str = lease.job_id) -> str:
            try:
                return (await jobs.cancel(job_id)).outcome
            except AijobsError as error:
                return error.reason

        answer, submitted = await asyncio.gather(cancel(), jobs.submit(lease, success()))
        if answer == "requested":
            assert isinstance(submitted, CancelRequested)
            assert isinstance(await jobs.submit(lease, Cancelled()), Accepted)
            assert await state(jobs, lease.job_id) == JobState.CANCELLED
        else:
            assert answer == "JOB_NOT_CANCELLABLE"
            assert isinstance(submitted, Accepted)
            assert await state(jobs, lease.job_id) == JobState.SUCCEEDED


async def test_one_job_twice_in_a_batch_is_reported_once(jobs: Jobs) -> None:
    lease = await jobs.running()
    same, other = (Outcome(lease=lease, report=success({"text": text})) for text in ("same", "other"))
    results = await jobs.execution.submit("executor-1", [same, same, other])
    assert [type(result) for result in results] == [Accepted, Accepted, NotAttempted]
    assert await jobs.history(lease.job_id) == ["created", "locked", "succeeded"]


async def test_a_type_that_this_replica_does_not_know_is_no_obstacle(jobs: Jobs) -> None:
    """A rolling upgrade: what the definition says about failures was frozen in the job when it was created."""
    leases = [await jobs.running(job_type="patient"), await jobs.running()]
    follow_ups = FollowUpJobs(Registry([]), jobs.wakeups, jobs.order)
    older = JobExecution(jobs.database, jobs.wakeups, Projections(follow_ups, BusinessRows({})))
    results = await older.submit("executor-1", [Outcome(lease=lease, report=failure("TIMEOUT")) for lease in leases])
    assert [(result.job.lifecycle_status, result.backoff) for result in results if isinstance(result, Accepted)] == [
        (JobState.RUNNING, timedelta(seconds=2)),
        (JobState.FAILED, None),
    ]


async def test_a_repeated_failure_report_of_a_lease_that_is_lost_does_not_run_again(jobs: Jobs) -> None:
    """LC-5: the failure was counted, and then somebody else took the job over."""
    lease = await jobs.running()
    await jobs.submit(lease, failure("PROVIDER_TIMEOUT"))

    async def take_over(tx: Transaction) -> None:
        await tx.execute(update(job_table).values(attempt=2, lease_token="other"))

    await jobs.database.write(take_over)
    assert isinstance(await jobs.submit(lease, failure("PROVIDER_TIMEOUT")), LeaseLost)


async def test_a_report_that_does_not_fit_a_column_harms_only_itself(jobs: Jobs) -> None:
    leases = [await jobs.running() for _ in range(2)]
    long_type = ArtifactRow(
        job_id=leases[0].job_id, artifact_type="x" * 65, artifact_id="a", ordinal=0, content_json="{}"
    )
    results = await jobs.execution.submit(
        "executor-1",
        [
            Outcome(lease=leases[0], report=success(artifacts=[long_type])),
            Outcome(lease=leases[1], report=success()),
        ],
    )
    assert [type(result) for result in results] == [InvalidInput, Accepted]


@pytest.mark.parametrize("ordinal", [-1, 2**31])
async def test_an_ordinal_out_of_range_is_refused(jobs: Jobs, ordinal: int) -> None:
    lease = await jobs.running()
    refusal = await jobs.submit(lease, success(artifacts=[artifact(lease.job_id, ordinal)]))
    assert isinstance(refusal, InvalidInput)
    assert [violation.field for violation in refusal.violations] == ["succeeded.projection.artifacts[0].ordinal"]


async def test_a_lock_hands_out_only_what_one_answer_can_hold(jobs: Jobs) -> None:
    """Six snapshots of 900 KB outgrow a gRPC message: what does not fit is not locked either."""
    ids = [(await jobs.create(input={"text": "x" * 900_000})).job.job_id for _ in range(6)]
    first = await jobs.leasing.lock(
        await jobs.holder("executor-1"), [LockRequest(job_id=id_, lease_token="t" * 32) for id_ in ids]
    )
    assert [type(result) for result in first] == [Locked] * 3 + [NotAttempted] * 3
    assert [await state(jobs, id_) for id_ in ids] == [JobState.RUNNING] * 3 + [JobState.QUEUED] * 3
    again = await jobs.leasing.lock(
        await jobs.holder("executor-1"), [LockRequest(job_id=id_, lease_token="t" * 32) for id_ in ids[3:]]
    )
    assert [type(result) for result in again] == [Locked] * 3


async def test_history_numbers_have_no_gaps(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, failure("PROVIDER_TIMEOUT", 1))
    await jobs.submit(lease, success())
    entries = await jobs.queries.history(lease.job_id, after_sequence=0)
    assert [entry.sequence for entry in entries] == [1, 2, 3, 4]
    assert [(entry.from_state, entry.to_state) for entry in entries] == [
        (None, "queued"),
        ("queued", "running"),
        ("running", "running"),
        ("running", "succeeded"),
    ]


async def test_a_provider_that_wants_to_be_left_alone_is(jobs: Jobs) -> None:
    """EX-2: Retry-After counts if it is longer than the backoff."""
    lease = await jobs.running()
    waits = []
    for execution, retry_after in ((1, timedelta(seconds=20)), (2, timedelta(milliseconds=1))):
        report = replace(failure("PROVIDER_RATE_LIMITED", execution), retry_after=retry_after)
        for _ in range(2):  # the repeat gets the same answer
            accepted = await jobs.submit(lease, report)
            assert isinstance(accepted, Accepted)
            waits.append(accepted.backoff)
    assert waits == [*[timedelta(seconds=20)] * 2, *[timedelta(seconds=4)] * 2]


async def test_a_wait_beyond_the_time_of_the_whole_run_fails_at_once(jobs: Jobs) -> None:
    """EX-4: the database's clock, from the first start."""
    lease = await jobs.running()
    await set_back(jobs, started=timedelta(seconds=50), run_timeout=timedelta(seconds=60))
    short = replace(failure("PROVIDER_RATE_LIMITED"), retry_after=timedelta(seconds=5))
    accepted = await jobs.submit(lease, short)
    assert isinstance(accepted, Accepted)
    assert accepted.backoff == timedelta(seconds=5)
    long = replace(failure("PROVIDER_RATE_LIMITED", 2), retry_after=timedelta(seconds=10))
    accepted = await jobs.submit(lease, long)
    assert isinstance(accepted, Accepted)
    assert (accepted.job.lifecycle_status, accepted.job.error_code) == (JobState.FAILED, "PROVIDER_RATE_LIMITED")
    assert accepted.job.retry_count == 2


async def test_a_lock_says_how_much_time_the_whole_run_has_left(jobs: Jobs) -> None:
    """Hand-backs and takeovers do not begin it anew."""
    created = await jobs.create()
    locked = await jobs.lock(created.job.job_id)
    # Three executions of 10 s, backoffs of 2 and 4 s, three takeovers of 10 s with 2 min each, half an hour in line.
    assert locked.job.run_timeout_ms == 36_000 + 390_000 + 1_800_000
    assert locked.job.run_remaining is not None
    assert timedelta(seconds=2220) < locked.job.run_remaining <= timedelta(seconds=2226)
    await set_back(jobs, started=timedelta(seconds=425), run_timeout=timedelta(seconds=426))
    await jobs.submit(lease_of(locked), Released(reason="for the test"))
    again = await jobs.lock(created.job.job_id)
    assert again.job.run_remaining is not None
    assert again.job.run_remaining <= timedelta(seconds=1)


async def test_a_job_of_before_there_was_a_bound_has_none(jobs: Jobs) -> None:
    lease = await jobs.running()
    await set_back(jobs, started=timedelta(days=30), run_timeout=None)
    accepted = await jobs.submit(lease, failure("PROVIDER_TIMEOUT"))
    assert isinstance(accepted, Accepted)
    assert accepted.backoff == timedelta(seconds=2)
    assert accepted.job.run_remaining is None


async def set_back(jobs: Jobs, *, started: timedelta, run_timeout: timedelta | None) -> None:
    """Let every running job have started so long ago."""
    milliseconds = None if run_timeout is None else run_timeout // timedelta(milliseconds=1)

    async def work(tx: Transaction) -> None:
        await tx.execute(update(job_table).values(started_at=now_plus(-started), run_timeout_ms=milliseconds))

    await jobs.database.write(work)
