"""kill -9, SIGTERM and SIGSTOP of each service: a job that was not locked yet runs exactly once."""

import asyncio
from datetime import timedelta

import pytest

from deploy.local.processes import ServiceProcess
from services.jobs.store.tables import job_history

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENVIRONMENT = {
    "AIJOBS_HEARTBEAT_SECONDS": "0.2",
    # A claim that a dead dispatcher's last call has got is soon over.
    "AIJOBS_CLAIM_SECONDS": "3",
    "AIJOBS_CLAIM_RELEASE_SECONDS": "0.2",
}


async def test_jobs_killed_right_after_it_answered_a_create(engine):
    job_id = await engine.create()
    await engine.jobs.kill()
    await engine.jobs.start()
    await engine.require_run_once(job_id)


async def test_jobs_killed_while_dispatcher_and_executor_wait_for_it(engine):
    engine.dispatcher.freeze()
    job_id = await engine.create()
    await engine.jobs.kill()
    engine.dispatcher.thaw()
    await engine.until_logged(engine.dispatcher, "the jobs service does not answer")
    await engine.jobs.start()
    await engine.require_run_once(job_id)


async def test_dispatcher_dead_when_the_job_is_created(engine):
    await engine.dispatcher.kill()
    job_id = await engine.create()
    assert await engine.kinds(job_id) == ["created"]
    await engine.dispatcher.start()
    await engine.require_run_once(job_id)


async def test_executor_dead_when_the_message_is_in_the_broker(engine):
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    assert await engine.kinds(job_id) == ["created"]
    await engine.executor.start()
    await engine.require_run_once(job_id)


async def test_executor_killed_with_the_message_in_hand_before_it_could_lock(engine):
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    engine.jobs.freeze()
    await engine.executor.launch()
    # It has the message and cannot lock: its calls find nobody who answers. So it is not ready either.
    await engine.until_logged(engine.executor, "job not locked yet")
    await engine.executor.kill()
    engine.jobs.thaw()
    await engine.executor.start()
    await engine.require_run_once(job_id)


async def test_everything_killed_at_once_with_a_batch_waiting(engine):
    engine.dispatcher.freeze()
    job_ids = [await engine.create(echo=number) for number in range(10)]
    await asyncio.gather(*(process.kill() for process in engine.processes))
    await asyncio.gather(*(process.start() for process in engine.processes))
    for job_id in job_ids:
        await engine.require_run_once(job_id)


async def test_two_of_each_share_the_work_and_no_job_runs_twice(engine):
    await asyncio.gather(engine.add("executor"), engine.add("dispatcher"))
    job_ids = [await engine.create(sleep_ms=20, echo=number) for number in range(20)]
    for job_id in job_ids:
        await engine.require_run_once(job_id)
    locks = [(await engine.read(job_history, job_id=job_id, kind="locked"))[0] for job_id in job_ids]
    assert len({lock["actor"] for lock in locks}) == 2


@pytest.mark.parametrize("name", ["jobs", "dispatcher", "executor"])
async def test_sigterm_ends_a_service_in_good_order_and_the_job_that_runs_succeeds(engine, name):
    process: ServiceProcess = getattr(engine, name)
    job_id = await engine.create(sleep_ms=1500)
    await engine.changes(job_id, upto="locked")
    async with asyncio.timeout(10):
        await process.stop(patience=timedelta(seconds=15))
    assert await process.wait() == 0
    if name == "executor":
        # It let the run finish first.
        assert (await engine.row(job_id))["lifecycle_status"] == "succeeded"
    await process.start()
    await engine.require_run_once(job_id)


async def test_a_run_longer_than_the_drain_time_is_given_back_also_when_its_handler_does_not_stop(engine):
    await engine.executor.kill()
    impatient = await engine.add("executor", AIJOBS_DRAIN_SECONDS="0.5")
    job_id = await engine.create(sleep_ms=30_000, cancellation="ignore")
    await engine.changes(job_id, upto="locked")
    async with asyncio.timeout(8):
        await impatient.stop(patience=timedelta(seconds=15))
    assert await impatient.wait() == 0
    assert await engine.kinds(job_id) == ["created", "locked", "handed_back"]


async def test_the_report_of_a_run_is_repeated_until_the_restarted_jobs_service_has_it(engine):
    job_id = await engine.create(sleep_ms=500)
    await engine.changes(job_id, upto="locked")
    await engine.jobs.kill()
    await engine.until_logged(engine.executor, "outcome not stored yet")
    await engine.jobs.start()
    await engine.require_run_once(job_id)
