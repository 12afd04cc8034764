"""Runs whose executor dies, freezes or ends: they go on elsewhere, once, and nobody else's run is touched."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio

from aijobs.errors import JobAlreadyCancelled, JobNotCancellable
from aijobs.rpc.roles import Role
from aijobs.testing.model_server import Completion, Hang, ModelServer, RecordedRequest, Reply
from aijobs.v1 import job_pb2, job_service_pb2
from services.jobs.store.tables import executors, job_artifacts, job_history, jobs, model_invocations
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

#: LC-8: from the kill of an executor to the start of its run elsewhere.
STARTS_ELSEWHERE_WITHIN = timedelta(seconds=3)


class FirstCallHangs:
    """Answers every call of a model but the first."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: RecordedRequest) -> Reply:
        self.calls += 1
        return Hang() if self.calls == 1 else Completion({"answer": 42})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[ModelServer]:
    async with ModelServer(FirstCallHangs()) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, models: ModelServer) -> Engine:
    """Leases of 1 s, which is short enough to freeze an executor beyond them."""
    engine = await make_engine(
        AIJOBS_PROVIDER="openai",
        AIJOBS_PROVIDER_BASE_URL=models.base_url,
        AIJOBS_MODEL_PRIMARY="primary-model",
        AIJOBS_HEARTBEAT_SECONDS="0.2",
        AIJOBS_LEASE_SECONDS="1",
        AIJOBS_LEASE_GRACE_SECONDS="0.6",
        AIJOBS_REAP_SECONDS="0.2",
        AIJOBS_SWEEP_SECONDS="0.5",
        AIJOBS_SWEEP_PATIENCE_SECONDS="2",
    )
    await engine.start()
    return engine


async def running(engine: Engine, job_type: str = "synthetic", **wanted: object) -> str:
    job_id = await engine.create(job_type, **wanted)
    await engine.changes(job_id, upto="locked")
    return job_id


async def test_a_killed_executors_run_starts_elsewhere_within_seconds(engine):
    """Case L5: the session breaks with the process, and nobody waits for the lease."""
    await engine.executor.kill()
    victim = await engine.add("executor")
    job_id = await running(engine, sleep_ms=10_000)
    await engine.executor.start()
    await victim.kill()
    killed_at = asyncio.get_running_loop().time()
    await engine.changes(job_id, upto="taken_over")
    elapsed = timedelta(seconds=asyncio.get_running_loop().time() - killed_at)
    assert elapsed < STARTS_ELSEWHERE_WITHIN
    job = await engine.ended(job_id)
    assert (job.state, job.attempt, job.takeover_count, job.retry_count) == (job_pb2.JOB_STATE_SUCCEEDED, 2, 1, 0)
    assert await engine.kinds(job_id) == ["created", "locked", "lapsed", "taken_over", "succeeded"]
    assert len(await engine.read(job_artifacts, job_id=job_id)) == 1


async def test_an_executor_frozen_beyond_its_lease_finds_its_run_gone(engine, models):
    """Case L2: it thaws after another one has succeeded; nothing of it is taken but the bill."""
    job_id = await running(engine, "structured_generation", prompt="?", output_schema={"type": "object"})
    await models.arrival(1)
    await engine.add("executor")
    engine.executor.freeze()
    job = await engine.ended(job_id)
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_SUCCEEDED, 2)
    engine.executor.thaw()
    await models.disconnect(1)  # its call is stopped

    async def settled() -> bool:
        return all(call["settled_at"] for call in await engine.read(model_invocations, job_id=job_id))

    await until(settled, "the bill of both calls")
    first, second = await engine.read(model_invocations, job_id=job_id)
    assert (first["attempt"], first["late"], second["attempt"], second["late"]) == (1, True, 2, False)
    # The message of the second dispatch may have gone to the frozen executor too, until the sweep sent a third.
    kinds = [kind for kind in await engine.kinds(job_id) if kind != "dispatched_again"]
    assert kinds == ["created", "locked", "lapsed", "taken_over", "succeeded"]
    assert len(await engine.read(job_artifacts, job_id=job_id)) == 1
    await engine.until_logged(engine.executor, "run abandoned")
    assert lines_with(engine.executor.log, "run reported") == []
    await engine.require_run_once(await engine.create())


async def test_an_executor_that_ends_gives_back_the_runs_that_take_longer(engine):
    """Case L6: SIGTERM, a drain time shorter than the run; it starts elsewhere within 5 s and costs no retry."""
    await engine.executor.kill()
    leaving = await engine.add("executor", AIJOBS_DRAIN_SECONDS="0.3")
    job_ids = [await running(engine, sleep_ms=10_000) for _ in range(2)]
    await engine.executor.start()
    begun = asyncio.get_running_loop().time()
    stopping = asyncio.create_task(leaving.stop())
    for job_id in job_ids:
        await engine.changes(job_id, upto="taken_over", within=timedelta(seconds=5))
    assert asyncio.get_running_loop().time() - begun < 5
    await stopping
    assert await leaving.wait() == 0
    # It said goodbye, so nobody suspected it.
    await engine.until_logged(engine.jobs, "executor left")
    assert lines_with(engine.jobs.log, "executor disconnected")[1:] == []
    for job_id in job_ids:
        job = await engine.ended(job_id)
        assert (job.state, job.retry_count, job.takeover_count) == (job_pb2.JOB_STATE_SUCCEEDED, 0, 0)
        assert await engine.kinds(job_id) == ["created", "locked", "handed_back", "taken_over", "succeeded"]


async def test_a_job_that_kills_every_executor_dies_alone_in_the_end_and_its_neighbours_succeed(engine):
    """Case B9, EX-11: two executors it takes along; from then on it gets processes of its own to kill."""
    poison = await engine.create(kill=True, kill_attempts=100)
    good = [await engine.create(sleep_ms=100) for _ in range(4)]

    async def ended() -> bool:
        if engine.executor.pid is None:
            await engine.executor.launch()
        return bool((await engine.row(poison))["finished_at"])

    await until(ended, "the end of the job that kills", within=timedelta(seconds=60))
    row = await engine.row(poison)
    assert (row["lifecycle_status"], row["error_code"]) == ("failed", "INTERNAL_HANDLER_DIED")
    assert (row["attempt"], row["takeover_count"], row["retry_count"]) == (3, 2, 2)
    assert "SIGKILL" in row["error_internal"]
    assert await engine.kinds(poison) == [
        *("created", "locked", "lapsed", "taken_over", "lapsed", "taken_over", "execution_failed", "failed")
    ]
    assert engine.executor.pid is not None
    for job_id in good:
        assert (await engine.ended(job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
        assert len(await engine.read(job_artifacts, job_id=job_id)) == 1


async def test_a_drained_executor_finishes_its_run_and_takes_no_other(engine):
    job_id = await running(engine, sleep_ms=1_500)
    executor_id = (await engine.row(job_id))["locked_by"]
    async with engine.client(Role.ADMIN) as operator:
        await operator.drain_executor(executor_id)
        await engine.until_logged(engine.executor, "an operator drains this executor")
        waiting = await engine.create()
        await engine.require_run_once(job_id)
        assert await engine.kinds(waiting) == ["created"]
        (listed,) = [e for e in await operator.list_executors() if e.executor_id == executor_id]
        assert listed.HasField("drain_time")
    await engine.add("executor")
    await engine.require_run_once(waiting)
    assert await engine.executor.health() == "NOT_SERVING"
    await engine.executor.stop()
    assert await engine.executor.wait() == 0


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long, id="long")])
async def test_an_acknowledged_cancel_is_kept_and_a_refused_one_was_too_late(engine, count):
    """Case L3: cancelled at random around claim, lock and report; every answer comes true."""
    chance = random.Random(count)
    answers: dict[str, str] = {}
    places = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with places, engine.client(patience=timedelta(seconds=60)) as client:
            created = await client.create("synthetic", user_id=f"user-{number % 20}", input={"sleep_ms": number % 50})
            await asyncio.sleep(chance.uniform(0, 0.25))
            job_id = created.job.job_id
            try:
                outcome = (await client.cancel(job_id)).outcome
                answers[job_id] = job_service_pb2.CancelOutcome.Name(outcome)
            except JobNotCancellable:
                answers[job_id] = "too late"
            # Once more: while it stops, the same answer; afterwards a refusal that says the same.
            try:
                assert (await client.cancel(job_id)).outcome == job_service_pb2.CANCEL_OUTCOME_REQUESTED
            except JobAlreadyCancelled:
                assert answers[job_id] != "too late"
            except JobNotCancellable:
                assert answers[job_id] == "too late"

    await asyncio.gather(*map(one, range(count)))

    async def ended() -> bool:
        return all(row["finished_at"] for row in await engine.read(jobs))

    await until(ended, "the end of every job", within=timedelta(seconds=60))
    states = {row["job_id"]: row["lifecycle_status"] for row in await engine.read(jobs)}
    expected = {"too late": "succeeded"}
    assert {
        job_id for job_id, answer in answers.items() if states[job_id] != expected.get(answer, "cancelled")
    } == set()
    with_artifacts = {row["job_id"] for row in await engine.read(job_artifacts)}
    assert with_artifacts & set(answers) == {job_id for job_id in answers if states[job_id] == "succeeded"}
    ends = [
        row["job_id"] for row in await engine.read(job_history) if row["kind"] in ("succeeded", "failed", "cancelled")
    ]
    assert len(ends) == len(set(ends))
    assert len(set(answers.values())) >= 2, "the cancels came too early or too late to show anything"


async def test_the_executors_row_tells_who_was_lost(engine):
    job_id = await running(engine, sleep_ms=60_000)
    executor_id = (await engine.row(job_id))["locked_by"]
    await engine.executor.kill()

    async def lost() -> bool:
        (row,) = await engine.read(executors, executor_id=executor_id)
        return row["lost_at"] is not None

    await until(lost, "the loss of the executor in its row")
    async with engine.client() as client:
        assert (await client.cancel(job_id)).outcome == job_service_pb2.CANCEL_OUTCOME_CANCELLED
