"""PJ-3, ruling 12: jobs that a result calls for, created with its success or not at all."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import JsonValue

from aijobs.errors import AijobsError, InvalidIdempotencyKey, InvalidInput, LeaseLost, TooManyJobs
from aijobs.job_type import DEEPEST
from aijobs.registry import Registry
from aijobs.states import JobState
from services.jobs.business_rows import BusinessRows
from services.jobs.execution import Accepted, JobExecution, Outcome
from services.jobs.follow_ups import MOST_FOLLOW_UPS, FollowUpJobs
from services.jobs.lifecycle import Lease
from services.jobs.projections import Projections
from services.jobs.quotas import Limits
from services.jobs.results import FollowUp, Succeeded
from services.jobs.retrying import Retry
from services.jobs.store import tables
from services.jobs.store.database import Database
from tests.conformance.conftest import BACKEND, Jobs, failure, lease_of, new_job, success


def follow_up(job_type: str = "testing", value: JsonValue = None) -> FollowUp:
    return FollowUp(job_type=job_type, input_json=json.dumps({"text": "next"} if value is None else value))


def calling(*follow_ups: FollowUp, artifacts: Any = ()) -> Succeeded:
    result = success(artifacts=artifacts)
    return Succeeded(
        output_json=result.output_json, output_hash=result.output_hash, artifacts=artifacts, follow_ups=follow_ups
    )


async def called_for(jobs: Jobs, job_id: str) -> list[str]:
    return list((await jobs.queries.get(BACKEND, job_id, full=True)).follow_up_job_ids)


async def violations(jobs: Jobs, lease: Lease, *follow_ups: FollowUp) -> dict[str, str]:
    refusal = await jobs.submit(lease, calling(*follow_ups))
    assert isinstance(refusal, InvalidInput), refusal
    return {found.field.removeprefix("succeeded.projection."): found.description for found in refusal.violations}


async def test_a_result_brings_its_follow_up_jobs_with_it(jobs: Jobs) -> None:
    lease = await jobs.running(labels={"course": "7"}, target_type="answer", target_id="a-1", user_id="user-7")
    accepted = await jobs.submit(lease, calling(follow_up(), follow_up("patient", {"number": 3})))
    assert isinstance(accepted, Accepted)
    first, second = [
        (await jobs.queries.get(BACKEND, job_id, full=True)).job for job_id in await called_for(jobs, lease.job_id)
    ]
    assert [(job.job_type, job.idempotency_key, job.lifecycle_status) for job in (first, second)] == [
        ("testing", f"follow-up:{lease.job_id}:1", JobState.QUEUED),
        ("patient", f"follow-up:{lease.job_id}:2", JobState.QUEUED),
    ]
    for job in (first, second):
        assert (job.user_id, job.labels_json) == ("user-7", '{"course":"7"}')
        assert (job.target_type, job.target_id) == ("answer", "a-1")
        assert (job.parent_job_id, job.root_job_id, job.depth) == (lease.job_id, lease.job_id, 1)
    assert first.rank_at is not None
    assert second.rank_at is not None
    assert first.rank_at < second.rank_at
    # They run as any job does: dispatched, locked, with the input that was called for.
    assert {event.aggregate_id for event in await jobs.claim()} >= {first.job_id, second.job_id}
    locked = await jobs.lock(second.job_id)
    assert json.loads(locked.snapshot.content_json) == {"text": "", "number": 3}
    assert await jobs.history(second.job_id) == ["created", "locked"]


async def test_a_repeated_result_creates_none_again(jobs: Jobs) -> None:
    lease = await jobs.running()
    result = calling(follow_up())
    for _ in range(3):
        assert isinstance(await jobs.submit(lease, result), Accepted)
    together = await asyncio.gather(*(jobs.submit(lease, result) for _ in range(5)))
    assert all(isinstance(answer, Accepted) for answer in together)
    assert len(await called_for(jobs, lease.job_id)) == 1


async def test_of_several_results_each_gets_its_own(jobs: Jobs) -> None:
    leases = [await jobs.running() for _ in range(3)]
    results = await jobs.execution.submit(
        "executor-1",
        [Outcome(lease=lease, report=calling(*[follow_up()] * number)) for number, lease in enumerate(leases)],
    )
    assert all(isinstance(answer, Accepted) for answer in results)
    assert [len(await called_for(jobs, lease.job_id)) for lease in leases] == [0, 1, 2]


async def test_a_stale_result_creates_none(jobs: Jobs) -> None:
    lease = await jobs.running()
    stale = Lease(job_id=lease.job_id, attempt=lease.attempt, lease_token="x" * 32)
    assert isinstance(await jobs.submit(stale, calling(follow_up())), LeaseLost)
    assert await called_for(jobs, lease.job_id) == []


async def test_what_cannot_be_created_refuses_the_result_by_name_and_leaves_nothing(jobs: Jobs) -> None:
    lease = await jobs.running()
    found = await violations(
        jobs,
        lease,
        follow_up(),
        follow_up("unheard_of"),
        follow_up(value={"text": 7, "colour": "red"}),
        FollowUp(job_type="testing", input_json='{"text": NaN}'),
    )
    assert set(found) == {
        "follow_ups[1].job_type",
        "follow_ups[2].input.text",
        "follow_ups[2].input.colour",
        "follow_ups[3].input_json",
    }
    assert "unheard_of" in found["follow_ups[1].job_type"]
    too_many = await violations(jobs, lease, *[follow_up()] * (MOST_FOLLOW_UPS + 1))
    assert too_many == {"follow_ups": f"{MOST_FOLLOW_UPS + 1}; at most {MOST_FOLLOW_UPS}"}
    assert (await jobs.queries.get(BACKEND, lease.job_id, full=False)).job.lifecycle_status == JobState.RUNNING
    assert len(await jobs.rows(tables.jobs)) == 1
    assert isinstance(await jobs.submit(lease, success()), Accepted)


async def test_inputs_count_towards_the_size_of_a_result(jobs: Jobs) -> None:
    lease = await jobs.running()
    large = follow_up(value={"text": "x" * 900_000})
    assert isinstance(await jobs.submit(lease, calling(large, large, large)), InvalidInput)


async def test_a_chain_comes_to_an_end(jobs: Jobs) -> None:
    lease = await jobs.running()
    root = lease.job_id
    for depth in range(1, DEEPEST + 1):
        assert isinstance(await jobs.submit(lease, calling(follow_up())), Accepted)
        (job_id,) = await called_for(jobs, lease.job_id)
        job = (await jobs.queries.get(BACKEND, job_id, full=False)).job
        assert (job.depth, job.root_job_id) == (depth, root)
        locked = await jobs.lock(job_id)
        assert locked.job.lease_token is not None
        lease = Lease(job_id=job_id, attempt=1, lease_token=locked.job.lease_token)
    assert "chains are not longer" in (await violations(jobs, lease, follow_up()))["follow_ups"]
    # Also by way of a retry.
    assert isinstance(await jobs.submit(lease, failure("CREDENTIAL_REJECTED")), Accepted)
    retry = await jobs.retrying.retry("operator", Retry(request_id="r", job_id=lease.job_id, reason=""))
    again = lease_of(await jobs.lock(retry.job_id))
    assert "chains are not longer" in (await violations(jobs, again, follow_up()))["follow_ups"]


async def test_a_retried_job_is_as_deep_as_the_one_it_repeats(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, calling(follow_up()))
    (job_id,) = await called_for(jobs, lease.job_id)
    await jobs.cancel(job_id)
    retry = await jobs.retrying.retry("operator", Retry(request_id="r", job_id=job_id, reason=""))
    assert (retry.depth, retry.root_job_id, retry.parent_job_id) == (1, lease.job_id, None)


async def test_no_limit_refuses_a_follow_up_job_but_it_counts_for_the_next_create(database: Database) -> None:
    jobs = Jobs(database, limits=Limits(live=1))
    lease = await jobs.running()
    assert isinstance(await jobs.submit(lease, calling(follow_up(), follow_up())), Accepted)
    assert len(await called_for(jobs, lease.job_id)) == 2
    (refusal,) = await jobs.creation.create("backend", [new_job()])
    assert isinstance(refusal, TooManyJobs)


async def test_nobody_can_take_the_key_of_a_follow_up_job(jobs: Jobs) -> None:
    lease = await jobs.running()
    key = f"follow-up:{lease.job_id}:1"
    (refusal,) = await jobs.creation.create("backend", [new_job(idempotency_key=key)])
    assert isinstance(refusal, InvalidIdempotencyKey)
    assert "engine's" in refusal.message


@pytest.mark.parametrize("rounds", [10])
async def test_results_of_one_user_beside_creates_and_retries_of_the_same_user(jobs: Jobs, rounds: int) -> None:
    """They lock the user, then jobs, in the same order: none of them is ever a failure for its caller."""
    leases = [await jobs.running() for _ in range(rounds)]
    ended = [await jobs.create() for _ in range(rounds)]
    for created in ended:
        await jobs.cancel(created.job.job_id)
    results = await asyncio.gather(
        *(jobs.submit(lease, calling(follow_up())) for lease in leases),
        *(jobs.create() for _ in range(rounds)),
        *(
            jobs.retrying.retry("operator", Retry(request_id=created.job.job_id, job_id=created.job.job_id, reason=""))
            for created in ended
        ),
    )
    assert not [result for result in results if isinstance(result, AijobsError)]
    ranks = [row["rank_at"] for row in await jobs.rows(tables.jobs) if row["rank_at"] is not None]
    assert len(ranks) == len(set(ranks))


async def test_of_two_results_of_one_job_the_one_that_is_taken_brings_its_own(jobs: Jobs) -> None:
    lease = await jobs.running()
    stale = Lease(job_id=lease.job_id, attempt=lease.attempt, lease_token="x" * 32)
    results = await jobs.execution.submit(
        "executor-1",
        [
            Outcome(lease=lease, report=calling(follow_up(value={"text": "mine"}))),
            Outcome(lease=stale, report=calling(follow_up(value={"text": "stale"}), follow_up())),
        ],
    )
    assert [isinstance(answer, Accepted) for answer in results] == [True, False]
    (job_id,) = await called_for(jobs, lease.job_id)
    assert json.loads((await jobs.lock(job_id)).snapshot.content_json)["text"] == "mine"


async def test_a_repeat_is_not_judged_anew_by_a_replica_that_knows_other_job_types(jobs: Jobs) -> None:
    """Ruling 33, in a rolling upgrade: it is taken as it was."""
    lease = await jobs.running()
    result = calling(follow_up())
    assert isinstance(await jobs.submit(lease, result), Accepted)
    follow_ups = FollowUpJobs(Registry([]), jobs.wakeups, jobs.order)
    other = JobExecution(jobs.database, jobs.wakeups, Projections(follow_ups, BusinessRows({})))
    (again,) = await other.submit("executor-1", [Outcome(lease=lease, report=result)])
    assert isinstance(again, Accepted)
