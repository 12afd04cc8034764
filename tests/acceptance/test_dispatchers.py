"""Dispatchers that are killed, frozen or many: nothing is lost, nothing is late for a minute, nothing is sent twice."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
import pytest_asyncio
from sqlalchemy import delete, text

from deploy.local.processes import ServiceProcess
from deploy.local.provision import BrokerServer
from services.jobs.store.tables import dispatchers, jobs, model_invocations, outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import Engine, lines_with
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

QUEUE = "ai-interactive"
#: A dispatcher that was killed loses its claims after the three seconds that it may be silent; a claim itself goes on
#: for a minute.
RELEASED_WITHIN = timedelta(seconds=15)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, own_rabbitmq: BrokerServer) -> Engine:
    engine = await make_engine(
        broker_url=own_rabbitmq.address.url(), AIJOBS_QUEUE_DEPTH="100000", AIJOBS_USER_LIVE_JOBS="100000"
    )
    await engine.start()
    return engine


@pytest.fixture(autouse=True)
def _thawed(own_rabbitmq: BrokerServer) -> Iterator[None]:
    """Let a test that fails in the middle of a freeze leave nothing frozen to the next one."""
    yield
    own_rabbitmq.thaw()


async def claimed_while_frozen(engine: Engine, broker: BrokerServer) -> str:
    """Freeze the broker, so that a job's event is claimed and its publishing hangs; return the job's id.

    The relay asks the broker for depths before each claim. If the freeze meets it there, it claims nothing: once more.
    """
    while True:
        broker.freeze()
        job_id = await engine.create()

        async def claimed(job_id: str = job_id) -> bool:
            return (await engine.event_statuses(job_id))["ai.job.enqueue"] == "processing"

        try:
            await until(claimed, "the claim", within=timedelta(seconds=2))
        except AssertionError:
            broker.thaw()
            await engine.require_run_once(job_id)
        else:
            return job_id


async def statuses(engine: Engine) -> Counter[str]:
    """Count the enqueue events by status."""
    return Counter(row["status"] for row in await engine.read(outbox_events, event_type="ai.job.enqueue"))


async def test_a_dispatcher_killed_between_confirm_and_settle_costs_messages_but_no_model_call(engine, own_rabbitmq):
    """Case B2: fifty messages twice in the broker, fifty model calls."""
    await engine.executor.kill()
    await engine.dispatcher.kill()
    job_ids = [
        await engine.create("structured_generation", prompt=f"Number {n}", output_schema={"type": "object"})
        for n in range(50)
    ]
    await engine.dispatcher.start()
    own_rabbitmq.freeze()

    async def all_claimed_or_sent() -> bool:
        return set(await statuses(engine)) <= {"processing", "published"}

    # Some may have been confirmed before the broker froze; the others hang in their publish.
    await until(all_claimed_or_sent, "every event is claimed")
    engine.jobs.freeze()
    own_rabbitmq.thaw()

    async def all_in_broker() -> bool:
        return bool((await own_rabbitmq.address.depth(QUEUE)).ready >= 50)

    await until(all_in_broker, "fifty messages in the broker")
    await engine.dispatcher.kill()
    engine.jobs.thaw()
    await engine.dispatcher.start()

    async def all_published() -> bool:
        return set(await statuses(engine)) == {"published"}

    await until(all_published, "every event is published", within=RELEASED_WITHIN)
    await engine.executor.start()
    for job_id in job_ids:
        await engine.require_run_once(job_id)
    calls = [row for row in await engine.read(model_invocations) if row["job_id"] in set(job_ids)]
    assert len(calls) == 50
    assert {row["attempt_count"] for row in await engine.read(outbox_events)} == {0}


async def test_a_dispatcher_frozen_past_its_claim_settles_nothing_when_it_thaws(engine, own_rabbitmq):
    """Case B4."""
    job_id = await claimed_while_frozen(engine, own_rabbitmq)
    (claimed,) = await engine.read(outbox_events, aggregate_id=job_id)
    engine.dispatcher.freeze()
    own_rabbitmq.thaw()
    await engine.add("dispatcher")
    await engine.require_run_once(job_id)
    (published,) = await engine.read(outbox_events, aggregate_id=job_id, event_type="ai.job.enqueue")
    assert published["locked_by"] != claimed["locked_by"]
    engine.dispatcher.thaw()
    await engine.until_logged(engine.dispatcher, "events settled too late")
    (after,) = await engine.read(outbox_events, aggregate_id=job_id, event_type="ai.job.enqueue")
    assert after == published
    assert await engine.kinds(job_id) == ["created", "locked", "succeeded"]


async def test_a_killed_dispatchers_claims_are_free_within_seconds(engine, own_rabbitmq):
    job_id = await claimed_while_frozen(engine, own_rabbitmq)
    await engine.dispatcher.kill()
    own_rabbitmq.thaw()
    await engine.add("dispatcher")
    # The broker may have had the message in its socket already; then it comes twice.
    async with asyncio.timeout(RELEASED_WITHIN.total_seconds()):
        await engine.until_event(job_id, "published")
    assert lines_with(engine.jobs.log, "claims released")
    await engine.require_run_once(job_id)


@pytest.mark.parametrize("seconds", [12, pytest.param(120, marks=pytest.mark.long, id="long")])
async def test_dispatchers_killed_again_and_again_lose_no_job(engine, seconds: int):
    """Case B3: a random one of two every two seconds, under creates that go on all the time."""
    other = await engine.add("dispatcher")
    choice = random.Random(seconds)
    created: list[str] = []
    until_time = asyncio.get_running_loop().time() + seconds

    async def create_on() -> None:
        while asyncio.get_running_loop().time() < until_time:
            created.append(await engine.create(echo=len(created)))
            await asyncio.sleep(0.04)

    creating = asyncio.create_task(create_on())
    victims: list[ServiceProcess] = [engine.dispatcher, other]
    while not creating.done():
        victim = choice.choice(victims)
        await victim.kill()
        await victim.start()
        await asyncio.wait({creating}, timeout=2)
    await creating
    await require_all_succeed(engine, created, within=timedelta(seconds=90))


async def require_all_succeed(engine: Engine, job_ids: list[str], *, within: timedelta) -> None:
    """Check that jobs succeed, each after one lock, and that nothing is left in the outbox."""
    wanted = set(job_ids)

    async def all_ended() -> bool:
        return all(row["finished_at"] is not None for row in await engine.read(jobs) if row["job_id"] in wanted)

    async def all_sent() -> bool:
        return {row["status"] for row in await engine.read(outbox_events)} == {"published"}

    await until(all_ended, "every job has ended", within=within)
    await until(all_sent, "every event is published", within=RELEASED_WITHIN)
    rows = [row for row in await engine.read(jobs) if row["job_id"] in wanted]
    assert len(rows) == len(wanted) > 0
    assert {(row["lifecycle_status"], row["attempt"]) for row in rows} == {("succeeded", 1)}
    assert {row["attempt_count"] for row in await engine.read(outbox_events)} == {0}


@pytest.mark.parametrize("seconds", [8, pytest.param(300, marks=pytest.mark.long, id="long")])
async def test_a_broker_that_is_stopped_under_load_costs_nothing(engine, own_rabbitmq, seconds: int):
    """Case B5: creates go on all the while, no event dies, and every job finishes afterwards."""
    created = [await engine.create(echo=number) for number in range(5)]
    await own_rabbitmq.stop()
    until_time = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_time:
        created.append(await engine.create(echo=len(created)))
        await asyncio.sleep(0.2)
    assert "dead" not in await statuses(engine)
    await own_rabbitmq.start()
    await require_all_succeed(engine, created, within=timedelta(seconds=90))


@pytest.mark.parametrize("each", [1_000, pytest.param(20_000, marks=pytest.mark.long, id="long")])
async def test_two_dispatchers_share_a_backlog_without_doubles(engine, own_rabbitmq, each: int, record_property):
    """OB-7: no message twice while both are healthy, and neither does less than three tenths of the work."""
    await engine.executor.kill()
    await engine.dispatcher.kill()
    await own_rabbitmq.control("purge_queue", QUEUE)
    total = 2 * each
    await backlog(engine, total)
    before = {row["dispatcher_id"] for row in await engine.read(dispatchers)}
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(engine.dispatcher.start(), engine.add("dispatcher"))

    async def all_published() -> bool:
        published = await engine.count_where(outbox_events, status="published", aggregate_type="Backlog")
        return bool(published == total)

    await until(all_published, "every event is published", within=timedelta(seconds=600))
    record_property("events_per_second", round(total / (loop.time() - began)))
    rows = await engine.read(outbox_events, aggregate_type="Backlog")
    shares = Counter(row["locked_by"] for row in rows)
    assert len(shares) == 2
    assert before.isdisjoint(shares)
    assert min(shares.values()) >= 0.3 * total, shares
    assert (await own_rabbitmq.address.depth(QUEUE)).ready == total, "a message for each event, and no more"
    assert {row["attempt_count"] for row in rows} == {0}
    for process in (engine.jobs, engine.dispatcher):
        for trouble in ("transaction given up", "batch replayed", "item failed", "not settled", "settled too late"):
            assert not lines_with(process.log, trouble)
    await own_rabbitmq.control("purge_queue", QUEUE)


async def backlog(engine: Engine, count: int) -> None:
    """Write pending events of jobs that do not exist, as many creates would; and no others of that kind."""
    await engine.execute(delete(outbox_events).where(outbox_events.c.aggregate_type == "Backlog"))
    payload = {
        "jobId": "00000000-0000-7000-8000-000000000000",
        "jobType": "synthetic",
        "queueName": QUEUE,
        "priority": 50,
    }
    statement = text(
        "INSERT INTO outbox_events (event_id, event_type, aggregate_type, aggregate_id, dedupe_key, payload_json,"
        " queue, status, attempt_count, rank_at, created_at)"
        " SELECT UUID(), 'ai.job.enqueue', 'Backlog', UUID(), CONCAT('backlog-', seq), :payload, :queue, 'pending', 0,"
        f" UTC_TIMESTAMP(6) + INTERVAL seq MICROSECOND, UTC_TIMESTAMP(6) FROM seq_1_to_{count}"
    )
    await engine.execute(statement.bindparams(payload=json.dumps(payload), queue=QUEUE))
