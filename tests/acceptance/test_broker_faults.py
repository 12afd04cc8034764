"""What goes wrong with the broker under whole services: an alarm, a queue that is gone."""

import pytest
import pytest_asyncio

from deploy.local.provision import BrokerServer
from services.jobs.store.tables import outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.waiting import until
from tests.alarm import memory_alarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUEUE = "ai-interactive"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, own_rabbitmq: BrokerServer) -> Engine:
    engine = await make_engine(broker_url=own_rabbitmq.address.url())
    await engine.start()
    return engine


async def attempts(engine: Engine) -> set[int]:
    """Return how many attempts events have used up."""
    return {event["attempt_count"] for event in await engine.read(outbox_events)}


async def test_an_alarm_of_the_broker_costs_no_event_an_attempt(engine, own_rabbitmq):
    """OB-4: a blocked connection is nobody's fault; everything flows by itself afterwards."""
    async with memory_alarm(own_rabbitmq):
        job_ids = [await engine.create() for _ in range(10)]
        await engine.until_logged(engine.dispatcher, "the broker takes no messages")

        async def not_ready() -> bool:
            return bool(await engine.dispatcher.health() == "NOT_SERVING")

        await until(not_ready, "the dispatcher not to be ready")
        assert [row["event_type"] for row in await engine.read(outbox_events, status="published")] == []
    for job_id in job_ids:
        await engine.require_run_once(job_id)
    assert await attempts(engine) == {0}
    assert len(lines_with(engine.dispatcher.log, "the broker takes no messages")) == 1
    assert len(lines_with(engine.dispatcher.log, "the broker takes messages again")) == 1


async def test_a_work_queue_that_is_deleted_costs_no_event_and_no_message(engine, own_rabbitmq):
    """Case B6: the exchange stays, so a message for the queue has nowhere to go; it is told, and the queue declared."""
    await engine.executor.kill()
    await own_rabbitmq.control("delete_queue", QUEUE)
    job_ids = [await engine.create() for _ in range(20)]
    for job_id in job_ids:
        await engine.until_event(job_id, "published")
    # What is marked published is there: nothing was counted as sent that had nowhere to go.
    assert (await own_rabbitmq.address.depth(QUEUE)).ready == 20
    assert await attempts(engine) == {0}
    await engine.executor.start()
    for job_id in job_ids:
        await engine.require_run_once(job_id)
