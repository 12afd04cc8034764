"""Cancelling a job wherever it is, and leases of handlers that misbehave."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio

from aijobs.errors import JobAlreadyCancelled, JobNotCancellable
from aijobs.testing.model_server import Hang, ModelServer
from aijobs.v1 import job_pb2, job_service_pb2
from services.jobs.store.tables import job_artifacts, model_invocations
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine
from tests.acceptance.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANCELLED = job_service_pb2.CANCEL_OUTCOME_CANCELLED
REQUESTED = job_service_pb2.CANCEL_OUTCOME_REQUESTED
#: Two heartbeats of 0.2 s, and what a busy machine needs.
SOON = timedelta(seconds=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def silent_models() -> AsyncIterator[ModelServer]:
    """A model server that never answers."""
    async with ModelServer(lambda _: Hang()) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, silent_models: ModelServer) -> Engine:
    engine = await make_engine(
        AIJOBS_PROVIDER="openai",
        AIJOBS_PROVIDER_BASE_URL=silent_models.base_url,
        AIJOBS_MODEL_PRIMARY="primary-model",
        AIJOBS_HEARTBEAT_SECONDS="0.2",
        AIJOBS_LEASE_SECONDS="1",
    )
    await engine.start()
    return engine


async def cancel(engine: Engine, job_id: str) -> "job_service_pb2.CancelOutcome.ValueType":
    async with engine.client() as client:
        return (await client.cancel(job_id, reason="changed my mind")).outcome


async def running(engine: Engine, job_type: str = "synthetic", **wanted: object) -> str:
    job_id = await engine.create(job_type, **wanted)
    await engine.changes(job_id, upto="locked")
    return job_id


async def require_cancelled(engine: Engine, job_id: str, *, within: timedelta = SOON) -> None:
    job = await engine.ended(job_id, within=within)
    assert job.state == job_pb2.JOB_STATE_CANCELLED
    assert not job.HasField("error")
    assert not job.output_json
    assert await engine.kinds(job_id) == ["created", "locked", "cancel_requested", "cancelled"]
    assert await engine.read(job_artifacts, job_id=job_id) == []
    await engine.until_event(job_id, "published", "ai.job.cancelled")


async def test_a_queued_job_is_cancelled_at_once_and_never_runs(engine):
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    assert await cancel(engine, job_id) == CANCELLED
    await engine.executor.start()
    # The message of the cancelled job is in front of this one.
    later = await engine.create()
    await engine.require_run_once(later)
    await engine.until_logged(engine.executor, "job not taken")
    assert await engine.kinds(job_id) == ["created", "cancelled"]
    (last,) = (await engine.changes(job_id))[-1:]
    assert (last.actor, last.reason) == ("caller:shop", "changed my mind")


async def test_a_running_job_is_asked_to_stop_and_does_so_with_the_next_heartbeat(engine):
    job_id = await running(engine, sleep_ms=60_000)
    assert await cancel(engine, job_id) == REQUESTED
    await require_cancelled(engine, job_id)
    row = await engine.row(job_id)
    assert row["finished_at"] - row["cancel_requested_at"] < timedelta(seconds=2)


async def test_a_job_that_has_ended_cannot_be_cancelled_and_a_cancelled_one_not_twice(engine):
    job_id = await engine.create()
    await engine.ended(job_id)
    with pytest.raises(JobNotCancellable, match="succeeded"):
        await cancel(engine, job_id)
    job_id = await running(engine, sleep_ms=60_000)
    await cancel(engine, job_id)
    await require_cancelled(engine, job_id)
    with pytest.raises(JobAlreadyCancelled):
        await cancel(engine, job_id)


async def test_a_model_call_that_hangs_is_cut_on_the_wire(engine, silent_models):
    number = len(silent_models.requests) + 1
    job_id = await running(engine, "structured_generation", prompt="?", output_schema={"type": "object"})
    await silent_models.arrival(number)
    assert await cancel(engine, job_id) == REQUESTED
    await silent_models.disconnect(number)
    await require_cancelled(engine, job_id)
    (call,) = await engine.read(model_invocations, job_id=job_id)
    # What was sent may have been paid for.
    assert (call["error_code"], call["token_source"], call["output_tokens"]) == ("CANCELLED", "estimated", 0)
    assert call["input_tokens"] > 0
    assert call["settled_at"] is not None
    assert len(silent_models.requests) == number


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_up_the_cancel(engine):
    job_id = await running(engine, sleep_ms=8_000, cancellation="ignore")
    assert await cancel(engine, job_id) == REQUESTED
    await require_cancelled(engine, job_id)
    await engine.until_logged(engine.executor, "handler does not end though cancelled")
    # Its slot is free again.
    for job in [await engine.create() for _ in range(3)]:
        await engine.require_run_once(job)


async def test_a_handler_that_blocks_its_loop_keeps_its_lease(engine):
    blocking = await running(engine, block_ms=2_500)
    bystander = await running(engine)
    seen = set()

    async def ended() -> bool:
        row = await engine.row(blocking)
        if row["lock_until"] is not None:
            seen.add(row["lock_until"])
        return bool(row["finished_at"])

    await until(ended, "the end of the blocking job")
    await asyncio.gather(engine.require_run_once(blocking), engine.require_run_once(bystander))
    blocked, other = await engine.row(blocking), await engine.row(bystander)
    # The lease of 1 s was renewed all the time, with the loop really blocked: the other job could not go on either.
    assert blocked["finished_at"] - blocked["locked_at"] > timedelta(seconds=2.5)
    assert len(seen) >= 5
    assert max(seen) > blocked["locked_at"] + timedelta(seconds=2.5)
    assert other["locked_at"] < blocked["finished_at"]
    assert other["finished_at"] - blocked["locked_at"] > timedelta(seconds=2.5)
