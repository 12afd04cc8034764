"""The way to the broker is cut under whole services, or the broker cuts it: they come back by themselves.

Services that are started before their broker are in `test_outages.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import pytest_asyncio

from aijobs.testing.model_server import Completion, Held, ModelServer
from aijobs.v1 import job_pb2
from deploy.local.provision import BrokerServer
from services.jobs.store.tables import model_invocations
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.gate import Gate, Network
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

#: Case B7: from the recovery to the start of a new job.
RUNS_WITHIN = timedelta(seconds=60)
#: The broker gives up a connection after twice this silence.
HEARTBEAT_SECONDS = 2
SLOTS = 10
QUEUE = "ai-interactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A broker, and the way to it."""

    broker: BrokerServer
    gate: Gate
    network: Network


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def way(own_rabbitmq: BrokerServer) -> AsyncIterator[Way]:
    network = Network()
    gate = Gate(own_rabbitmq.address.url(), link=network.link)
    await gate.open()
    yield Way(broker=own_rabbitmq, gate=gate, network=network)
    await gate.shut()


class HeldModels(ModelServer):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(lambda _: Held(self.may_answer, Completion({"answer": 42})))
        self.may_answer = asyncio.Event()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[HeldModels]:
    async with HeldModels() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, way: Way, models: HeldModels) -> Engine:
    engine = await make_engine(
        broker_url=f"{way.gate.url}?heartbeat={HEARTBEAT_SECONDS}",
        AIJOBS_SLOTS_INTERACTIVE=str(SLOTS),
        AIJOBS_PROVIDER="openai",
        AIJOBS_PROVIDER_BASE_URL=models.base_url,
        AIJOBS_MODEL_PRIMARY="primary-model",
    )
    await engine.start()
    return engine


async def until_both_are_not_ready(engine: Engine) -> None:
    async def not_ready() -> bool:
        return {await engine.dispatcher.health(), await engine.executor.health()} == {"NOT_SERVING"}

    await until(not_ready, "dispatcher and executor not to be ready", within=timedelta(seconds=90))


async def require_a_new_job_to_run(engine: Engine, *earlier: str) -> None:
    """Check that a job that is created now, and those that were created before, run, and that both are ready again."""
    async with asyncio.timeout(RUNS_WITHIN.total_seconds()):
        for job_id in (*earlier, await engine.create()):
            await engine.ended(job_id, within=RUNS_WITHIN)
            await engine.require_run_once(job_id)
        await engine.dispatcher.ready()
        await engine.executor.ready()


async def test_a_broker_that_is_restarted_is_used_again(engine, way):
    await way.broker.until_kept(QUEUE)
    await way.broker.stop()
    job_id = await engine.create()
    await until_both_are_not_ready(engine)
    await way.broker.start()
    await require_a_new_job_to_run(engine, job_id)


async def test_a_network_that_was_cut_for_longer_than_the_heartbeat_is_used_again(engine, way):
    """Neither side hears of the other, and what was connected stays dead for ever."""
    way.network.cut()
    job_id = await engine.create()
    await until_both_are_not_ready(engine)
    way.network.mend()
    await require_a_new_job_to_run(engine, job_id)


@pytest.mark.long
async def test_a_cut_is_noticed_without_short_heartbeats_too(make_engine, way):
    """As it is deployed: publishing notices by its confirms, the consumer by its check."""
    # A virtual host of its own: two engines that share a queue take each other's messages.
    network = Network()
    gate = Gate(await way.broker.create_vhost("long"), link=network.link)
    await gate.open()
    engine = await make_engine(broker_url=gate.url)
    await engine.start()
    await engine.require_run_once(await engine.create())
    network.cut()
    job_id = await engine.create()
    await until_both_are_not_ready(engine)
    assert lines_with(engine.executor.log, "a check of the broker failed")
    network.mend()
    await require_a_new_job_to_run(engine, job_id)
    await engine.end()
    await gate.shut()


async def test_a_channel_that_the_broker_closes_costs_no_run_and_is_opened_again(engine, way):
    """Here for a message that is held for too long. Its run goes on, and the message that comes again is done with."""

    async def limits(held: int, tick: int) -> None:
        for name, value in (("consumer_timeout", held), ("channel_tick_interval", tick)):
            await way.broker.control("eval", f"application:set_env(rabbit, {name}, {value}).")
        # They are those of channels that are opened from now on.
        await engine.executor.restart()

    await limits(500, 500)
    try:
        job_id = await engine.create(sleep_ms=4_000)
        await engine.until_logged(engine.executor, "not consuming")
        await require_a_new_job_to_run(engine, job_id)
        await engine.until_logged(engine.executor, "job not taken")
    finally:
        await limits(1_800_000, 60_000)


@pytest.mark.parametrize("others", [True, False], ids=["beside_another", "alone"])
@pytest.mark.parametrize(
    "seconds", [0, pytest.param(10, marks=pytest.mark.long, id="long")], ids=lambda seconds: f"{seconds}s"
)
async def test_runs_outlive_a_cut_and_what_is_delivered_again_calls_no_model(engine, way, models, others, seconds):
    """Case B8: ten jobs run while their executor's broker is away; their messages go to others, or come again."""
    models.may_answer.clear()
    asked = len(models.requests)
    job_ids = [
        await engine.create("structured_generation", prompt="?", output_schema={"type": "object"}) for _ in range(SLOTS)
    ]
    await models.arrival(asked + SLOTS, within=timedelta(seconds=30))
    taker = engine.executor
    if others:
        taker = await engine.add("executor", AIJOBS_BROKER_URL=way.broker.address.url())
    refused_before = len(lines_with(taker.log, "job not taken"))  # its log may be that of an earlier test's

    def all_came_again() -> bool:
        return len(lines_with(taker.log, "job not taken")) - refused_before == SLOTS

    await way.gate.shut()
    await engine.until_logged(engine.executor, "not consuming")
    await asyncio.sleep(seconds)
    await way.gate.open()
    if others:
        await until(all_came_again, "messages to be done with elsewhere")
    models.may_answer.set()
    for job_id in job_ids:
        assert (await engine.ended(job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
        assert await engine.kinds(job_id) == ["created", "locked", "succeeded"]
        assert len(await engine.read(model_invocations, job_id=job_id)) == 1
    await until(all_came_again, "messages to be done with")
    assert len(models.requests) == asked + SLOTS
    await require_a_new_job_to_run(engine)
    # Nothing is held that would come again.
    await engine.executor.kill()
    await taker.kill()
    assert (await way.broker.address.depth(QUEUE)).ready == 0
