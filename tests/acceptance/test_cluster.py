"""Case B10: three nodes of RabbitMQ, and the one that leads the queue is killed under load. `make test-cluster`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
import pytest_asyncio
import structlog

from aijobs.broker.port import BrokerUnavailable, Message, Publisher
from aijobs.broker.rabbitmq import RabbitMqBroker
from deploy.local.lifeline import Lifeline
from deploy.local.machine import LocalMachine
from deploy.local.processes import ROOT
from deploy.local.provision import TEST_BROKER_URL, rabbitmq_programs
from deploy.local.rabbitmq import RabbitMqServer
from deploy.local.rabbitmq_cluster import RabbitMqCluster
from services.jobs.store.tables import outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.waiting import until
from tests.leftovers import processes_about, until_gone

pytestmark = [
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

QUEUE = "ai-interactive"
#: What "within seconds" is to publishers: an election, and a confirm that did not come in time.
RESUMES_WITHIN = timedelta(seconds=15)
PUBLISH_TIMEOUT = timedelta(seconds=5)
IN_FLIGHT = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RabbitMqCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    lifeline = Lifeline(folder / "lifeline").hold()
    binaries = rabbitmq_programs(LocalMachine(), variable=TEST_BROKER_URL)
    cluster = RabbitMqCluster(folder / "nodes", lifeline=lifeline, binaries=binaries)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.discard()
        lifeline.release()


@dataclass
class Load:
    """Publishes all the time, each message until it is confirmed, and notes when that was."""

    publisher: Publisher
    confirmed: dict[str, float] = field(default_factory=dict)
    over: bool = False

    async def run(self) -> None:
        await asyncio.gather(*(self._publish_one_by_one() for _ in range(IN_FLIGHT)))

    async def _publish_one_by_one(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.over:
            message = Message(queue=QUEUE, topic="", message_id=uuid4().hex, correlation_id="job", body=b"{}")
            while message.message_id not in self.confirmed:
                try:
                    await self.publisher.connect()
                    await self.publisher.publish(message, PUBLISH_TIMEOUT)
                except BrokerUnavailable:
                    await asyncio.sleep(0.05)
                else:
                    self.confirmed[message.message_id] = loop.time()


def urls(cluster: RabbitMqCluster, first: RabbitMqServer) -> list[str]:
    """Return the addresses of all nodes, one of them first."""
    return [node.url() for node in sorted(cluster.nodes, key=lambda node: node is not first)]


async def declared(cluster: RabbitMqCluster) -> None:
    publisher = RabbitMqBroker(urls(cluster, cluster.nodes[0])).publisher()
    await publisher.connect()
    await publisher.close()


@pytest.mark.parametrize("through_the_leader", [True, False], ids=["through_the_leader", "through_another"])
async def test_nothing_is_lost_when_the_leader_is_killed_and_publishing_resumes(cluster, through_the_leader):
    """Through another node the connection stays, and a channel of the time of the election may refuse for ever."""
    await declared(cluster)
    leader = await cluster.leader(QUEUE)
    other = next(node for node in cluster.nodes if node is not leader)
    broker = RabbitMqBroker(urls(cluster, leader if through_the_leader else other))
    load = Load(broker.publisher())
    running = asyncio.create_task(load.run())
    await until(lambda: len(load.confirmed) > 100, "load")

    assert await cluster.leader(QUEUE) is leader
    await leader.kill()
    killed_at = asyncio.get_running_loop().time()

    def after() -> int:
        return sum(moment > killed_at + 1 for moment in load.confirmed.values())

    await until(lambda: after() > 500, "publishing after the kill", within=timedelta(seconds=60))
    assert await cluster.leader(QUEUE) is not leader
    load.over = True
    await running
    await load.publisher.close()
    moments = sorted(load.confirmed.values())
    gap = max(later - earlier for earlier, later in pairwise(moments))
    structlog.get_logger().info("publishing resumed", confirmed=len(moments), longest_pause=round(gap, 2))
    assert gap < RESUMES_WITHIN.total_seconds()

    received: set[str] = set()
    async with asyncio.timeout(120), RabbitMqBroker(urls(cluster, other)).consumer(QUEUE, 100) as consumer:
        async for delivery in consumer.deliveries():
            received.add(delivery.message_id)
            await delivery.ack()
            if received >= set(load.confirmed):
                break
    await leader.start(within=timedelta(minutes=2))


async def test_every_job_runs_once_though_the_leader_is_killed(cluster, make_engine: MakeEngine):
    await declared(cluster)
    engine = await make_engine(broker_url=",".join(urls(cluster, cluster.nodes[0])), AIJOBS_SLOTS_INTERACTIVE="10")
    await engine.start()
    job_ids = []
    killing = None
    for number in range(120):
        job_ids.append(await engine.create(sleep_ms=20))
        if number == 40:
            leader = await cluster.leader(QUEUE)
            killing = asyncio.create_task(leader.kill())
    assert killing is not None
    await killing
    for job_id in job_ids:
        await engine.ended(job_id, within=timedelta(seconds=90))
        await engine.require_run_once(job_id)
    assert {(event["status"], event["attempt_count"]) for event in await engine.read(outbox_events)} == {
        ("published", 0)
    }


OWNER = """
import asyncio, sys
from pathlib import Path
from deploy.local.lifeline import Lifeline
from deploy.local.rabbitmq import RabbitMqBinaries
from deploy.local.rabbitmq_cluster import RabbitMqCluster

async def own(folder):
    lifeline = Lifeline(folder / "lifeline")
    await RabbitMqCluster(folder / "nodes", lifeline=lifeline, binaries=RabbitMqBinaries.find(), size=2).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(own(Path(sys.argv[1])))
"""


async def test_no_node_is_left_running_when_the_owner_is_killed(tmp_path):
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        running = "\n".join(processes_about(tmp_path))
        assert running.count("beam.smp") >= 2
        assert "epmd" in running
    finally:
        owner.kill()
        await owner.wait()
    await until_gone(tmp_path)
