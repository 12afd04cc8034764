"""Several jobs replicas, and servers that stall or restart: no healthy run is taken over, no change is missed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
import pytest_asyncio

from aijobs.broker.port import Message
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.rpc.roles import Role
from aijobs.v1 import job_pb2, job_service_pb2
from deploy.local.broker import BrokerAddress
from deploy.local.database import DatabaseAddress
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.processes import ServiceProcess
from services.jobs.store.tables import executors, job_history, outbox_events
from tests.acceptance.engine import USER, Engine, lines_with
from tests.acceptance.gate import Gate, Link
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

#: So rare that whatever happens sooner did not need a heartbeat.
ENVIRONMENT = {"AIJOBS_HEARTBEAT_SECONDS": "30"}


async def running(engine: Engine, **wanted: Any) -> str:
    job_id = await engine.create(**wanted)
    await engine.changes(job_id, upto="locked")
    return job_id


@pytest.fixture
def replica_address() -> str:
    return f"{LOOPBACK}:{free_port()}"


@pytest_asyncio.fixture(loop_scope="module")
async def replica(engine: Engine, replica_address: str) -> ServiceProcess:
    """A second jobs service on the same database."""
    process = engine.process("jobs", log="jobs-2", listen=replica_address)
    engine.lend(process)
    await process.start()
    return process


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
async def test_a_restart_of_the_only_jobs_replica_costs_no_run(engine, signal):
    """Case L8."""
    job_id = await running(engine, sleep_ms=4_000)
    await (engine.jobs.stop() if signal == "SIGTERM" else engine.jobs.kill())
    await engine.jobs.start()
    await engine.require_run_once(job_id)


async def test_a_cancel_reaches_a_run_at_once_and_not_with_its_heartbeat(engine):
    """LC-9: the session tells it."""
    job_id = await running(engine, sleep_ms=60_000)
    async with engine.client() as client:
        assert (await client.cancel(job_id)).outcome == job_service_pb2.CANCEL_OUTCOME_REQUESTED
    assert (await engine.ended(job_id, within=timedelta(seconds=3))).state == job_pb2.JOB_STATE_CANCELLED
    row = await engine.row(job_id)
    assert row["finished_at"] - row["cancel_requested_at"] < timedelta(seconds=1)


async def test_a_cancel_at_another_replica_than_the_executors_reaches_the_run(engine, replica):
    job_id = await running(engine, sleep_ms=60_000)
    async with engine.client(address=replica.address) as client:
        assert (await client.cancel(job_id)).outcome == job_service_pb2.CANCEL_OUTCOME_REQUESTED
    assert (await engine.ended(job_id, within=timedelta(seconds=4))).state == job_pb2.JOB_STATE_CANCELLED
    row = await engine.row(job_id)
    assert row["finished_at"] - row["cancel_requested_at"] < timedelta(seconds=2)


async def test_a_watch_at_one_replica_sees_what_others_commit_and_resumes_after_a_cut(engine, replica):
    """Every change once and in order, also when the replica that served the first half is gone."""
    async with engine.client(address=replica.address) as there:
        await engine.executor.kill()
        job_id = await engine.create(sleep_ms=300)
        seen: list[int] = []
        cut = asyncio.Event()

        async def follow() -> None:
            async with aclosing(there.watch(job_id, after_sequence=0)) as updates:
                async for update in updates:
                    if update.HasField("transition"):
                        seen.append(update.transition.sequence)
                        cut.set()

        following = asyncio.create_task(follow())
        async with asyncio.timeout(20):
            await cut.wait()
            await replica.kill()
            await engine.executor.start()
            await engine.ended(job_id)
            await replica.start()
            await following
    assert seen == [entry["sequence"] for entry in await engine.read(job_history, job_id=job_id)] == [1, 2, 3]


class Switch(Link):
    """Lets bytes pass, or holds them, as the test says; one for all connections."""

    def __init__(self) -> None:
        self.passing = asyncio.Event()
        self.passing.set()

    async def sent(self, data: bytes) -> bool:
        await self.passing.wait()
        return True

    async def answered(self, data: bytes) -> bool:
        await self.passing.wait()
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stalling(
    mariadb_address: DatabaseAddress, rabbitmq_address: BrokerAddress, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, Switch, Gate]]:
    """An engine whose database can stall, with leases that outlive that."""
    name = f"test_{uuid4().hex}"
    switch = Switch()
    url = await mariadb_address.create_database(name)
    gate = Gate(url, link=lambda: switch)
    await gate.open()
    engine = Engine(
        tmp_path_factory.mktemp("engine"),
        database_url=gate.url,
        direct_database_url=url,
        broker_url=await rabbitmq_address.create_vhost(name),
        environment={"AIJOBS_HEARTBEAT_SECONDS": "1", "AIJOBS_REAP_SECONDS": "0.5"},
    )
    # The executor's way to the jobs service can be cut, so that its session breaks while the database stalls.
    way = Gate(f"http://{engine.connections.jobs_address}")
    await way.open()
    await engine.migrate()
    await asyncio.gather(engine.jobs.start(), engine.dispatcher.start())
    await engine.add("executor", AIJOBS_ADDRESS=f"{LOOPBACK}:{way.port}")
    yield engine, switch, way
    await engine.end()
    await way.shut()
    await gate.shut()
    await mariadb_address.drop_database(name)
    await rabbitmq_address.delete_vhost(name)


@pytest.mark.parametrize("seconds", [4, pytest.param(20, marks=pytest.mark.long)])
async def test_a_database_that_stalls_costs_no_run(stalling, seconds):
    """Case L8: nobody can renew, and nobody can say hello; that is no sign of anybody's death."""
    engine, switch, way = stalling
    job_id = await running(engine, sleep_ms=seconds * 1000 + 2000)
    switch.passing.clear()
    # The session breaks in the middle of it: the suspicion has to wait, and so has the hello of the next one.
    await asyncio.sleep(seconds / 2)
    await way.shut()
    await way.open()
    await engine.until_logged(engine.jobs, "executor disconnected")
    await asyncio.sleep(seconds / 2)
    switch.passing.set()
    await engine.require_run_once(job_id)
    assert lines_with(engine.jobs.log, "executor lost") == []


async def test_a_session_that_moves_to_another_replica_costs_no_run(engine, replica):
    """Case L8: the replica that held it sees it break, and finds the executor elsewhere."""
    first, second = (Gate(f"http://{address}") for address in (engine.jobs.address, replica.address))
    await first.open()
    address = f"{LOOPBACK}:{first.port}"
    await engine.executor.stop()
    mover = await engine.add("executor", AIJOBS_ADDRESS=address)
    job_id = await running(engine, sleep_ms=4_000)
    executor_id = (await engine.row(job_id))["locked_by"]
    await first.shut()
    second.port = first.port
    await second.open()
    await engine.until_logged(engine.jobs, "executor disconnected")
    await engine.require_run_once(job_id)
    (row,) = await engine.read(executors, executor_id=executor_id)
    assert (row["session_epoch"], row["lost_at"]) == (2, None)
    assert len(lines_with(mover.log, "session open")) == 2
    assert [line for line in lines_with(engine.jobs.log, "executor lost") if executor_id in line] == []
    await second.shut()


class FrozenReaper(Link):
    """Holds a reaper between its look at the leases and its write, as a stop of its process would."""

    def __init__(self) -> None:
        self.job_id = ""
        self.holding = asyncio.Event()
        self.go_on = asyncio.Event()

    async def sent(self, data: bytes) -> bool:
        if self.job_id and b"FOR UPDATE" in data and self.job_id.encode() in data:
            self.holding.set()
            await self.go_on.wait()
        return True


async def test_a_report_that_comes_while_a_reaper_is_frozen_before_its_write_stands(engine):
    """Case L1: the reaper of a second replica, to which the lease has ended long ago."""
    link = FrozenReaper()
    gate = Gate(engine.connections.database_url, link=lambda: link)
    await gate.open()
    reaper = engine.process(
        "jobs",
        log="jobs-reaping",
        listen=f"{LOOPBACK}:{free_port()}",
        AIJOBS_DATABASE_URL=gate.url,
        AIJOBS_LEASE_GRACE_SECONDS="0.01",
        AIJOBS_REAP_SECONDS="0.1",
    )
    hasty = engine.process("jobs", log="jobs-hasty", listen=engine.connections.jobs_address, AIJOBS_LEASE_SECONDS="1")
    engine.lend(reaper)
    await engine.jobs.kill()
    engine.lend(hasty)
    await asyncio.gather(hasty.start(), reaper.start())
    # Its heartbeats are 30 s apart, so the lease ends; its holder may go on, for two thirds of the grace of 30 s.
    job_id = await running(engine, sleep_ms=3_000)
    link.job_id = job_id
    async with asyncio.timeout(10):
        await link.holding.wait()
    await engine.changes(job_id)
    link.go_on.set()
    # It has looked at the row by the time it reaps the next one.
    other = await running(engine, sleep_ms=60_000)
    await engine.changes(other, upto="lapsed")
    async with engine.client() as client:
        await client.cancel(other)
    await engine.ended(other)
    assert await engine.kinds(job_id) == ["created", "locked", "succeeded"]
    await gate.shut()


async def test_paused_jobs_that_are_in_the_broker_already_wait_and_go_on(engine):
    """Case L9."""
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    async with engine.client(Role.ADMIN) as operator:
        await operator.pause_queue("ai-interactive", reason="the model is down")
        await engine.executor.start()
        await engine.changes(job_id, upto="dispatched_again")
        # Its message was acknowledged, and the next one stays in the outbox: nothing goes round in circles.
        other = await engine.create()
        assert await engine.kinds(other) == ["created"]
        events = [row["status"] for row in await engine.read(outbox_events, aggregate_id=job_id)]
        assert sorted(events) == ["pending", "published"]
        await operator.resume_queue("ai-interactive")
    for waiting in (job_id, other):
        assert (await engine.ended(waiting)).state == job_pb2.JOB_STATE_SUCCEEDED
    assert await engine.kinds(job_id) == ["created", "dispatched_again", "locked", "succeeded"]


async def test_a_message_that_comes_before_its_job_is_due_is_acknowledged_and_the_job_starts_in_time(engine):
    """Case L9."""
    due = datetime.now(UTC) + timedelta(seconds=4)
    async with engine.client() as client:
        created = await client.create("synthetic", user_id=USER, input={}, run_at=due)
    job_id = created.job.job_id
    body = json.dumps({"jobId": job_id, "jobType": "synthetic"}).encode()
    early = Message(queue="ai-interactive", topic="", message_id=uuid4().hex, correlation_id=job_id, body=body)
    publisher = RabbitMqBroker([engine.connections.broker_url]).publisher()
    await publisher.connect()
    await publisher.publish(early, timedelta(seconds=5))
    await publisher.close()
    await engine.changes(job_id, upto="dispatched_again")
    job = await engine.ended(job_id)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    started = job.start_time.ToDatetime(tzinfo=UTC)
    assert timedelta(0) <= started - due < timedelta(seconds=3)
    assert await engine.kinds(job_id) == ["created", "dispatched_again", "locked", "succeeded"]


async def test_a_lost_message_is_sent_again(engine):
    """LC-13: the queue is purged; an executor is idle, so the sweep sees that nothing is on its way."""
    await engine.executor.kill()
    job_id = await engine.create()
    await engine.until_event(job_id, "published")
    async with await aio_pika.connect(engine.connections.broker_url) as connection:
        queue = await (await connection.channel()).get_queue("ai-interactive")
        assert (await queue.purge()).message_count == 1
    await engine.jobs.kill()
    quick = engine.process(
        "jobs",
        log="jobs-sweeping",
        listen=engine.connections.jobs_address,
        AIJOBS_SWEEP_SECONDS="0.3",
        AIJOBS_SWEEP_PATIENCE_SECONDS="1",
    )
    engine.lend(quick)
    await quick.start()
    await engine.executor.start()
    assert (await engine.ended(job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
    assert await engine.kinds(job_id) == ["created", "dispatched_again", "locked", "succeeded"]
    await until(lambda: lines_with(quick.log, "their messages are lost"), "a word about it in the log")
