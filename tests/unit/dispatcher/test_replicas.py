"""OB-6: a relay for each replica of the jobs service, as addresses come and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import cast

import pytest

from aijobs.broker.port import TopologyConflict
from aijobs.service import BrokenLoopError, background
from services.dispatcher.relay import Relay
from services.dispatcher.replicas import Replicas, look_up

SOON = timedelta(milliseconds=10)


class StandIn:
    """A relay that only says whether it works."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.working = asyncio.Event()
        self.ended = asyncio.Event()
        self.breaks: BaseException | None = None
        self.told = asyncio.Event()
        self._changed = changed

    async def run(self) -> None:
        try:
            await self.told.wait()
            if self.breaks is not None:
                raise self.breaks
        finally:
            self.ended.set()

    def retire(self) -> None:
        self.told.set()

    def work(self, *, works: bool) -> None:
        if works:
            self.working.set()
        else:
            self.working.clear()
        self._changed()


class Cluster:
    """The replicas that a name stands for, and the relays that were made for them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = frozenset(addresses)
        self.relays: dict[str, StandIn] = {}
        self.looked_up = asyncio.Event()
        self.made = asyncio.Event()

    async def lookup(self, address: str) -> frozenset[str]:
        assert address == "dns:///jobs:50051"
        self.looked_up.set()
        return self.addresses

    def make(self, address: str, changed: Callable[[], None]) -> Relay:
        self.relays[address] = StandIn(changed)
        self.made.set()
        return cast("Relay", self.relays[address])

    def replicas(self) -> Replicas:
        return Replicas("dns:///jobs:50051", self.make, lookup=self.lookup, interval=SOON)


@asynccontextmanager
async def running(replicas: Replicas) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(replicas.run())
    async with asyncio.timeout(10):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def looked_again(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.looked_up.clear()
        await cluster.looked_up.wait()


async def test_each_replica_has_a_relay_and_new_ones_get_theirs() -> None:
    cluster = Cluster("10.0.0.1:1", "10.0.0.2:1")
    async with running(cluster.replicas()):
        await looked_again(cluster)
        assert set(cluster.relays) == {"10.0.0.1:1", "10.0.0.2:1"}
        cluster.addresses |= {"10.0.0.3:1"}
        await looked_again(cluster)
        assert "10.0.0.3:1" in cluster.relays


async def test_the_relay_of_a_replica_that_is_gone_ends_and_the_others_go_on() -> None:
    cluster = Cluster("10.0.0.1:1", "10.0.0.2:1")
    async with running(cluster.replicas()) as task:
        await looked_again(cluster)
        cluster.addresses = frozenset({"10.0.0.2:1"})
        await cluster.relays["10.0.0.1:1"].ended.wait()
        await looked_again(cluster)
        assert not cluster.relays["10.0.0.2:1"].ended.is_set()
        assert not task.done()


async def test_a_name_that_cannot_be_resolved_just_now_ends_no_relay() -> None:
    cluster = Cluster("10.0.0.1:1")
    async with running(cluster.replicas()):
        await looked_again(cluster)
        cluster.addresses = frozenset()
        await looked_again(cluster)
        assert not cluster.relays["10.0.0.1:1"].ended.is_set()


async def test_it_works_while_any_relay_does() -> None:
    cluster = Cluster("10.0.0.1:1", "10.0.0.2:1")
    replicas = cluster.replicas()
    async with running(replicas):
        await looked_again(cluster)
        first, second = cluster.relays.values()
        assert not replicas.working.is_set()
        first.work(works=True)
        second.work(works=True)
        first.work(works=False)
        assert replicas.working.is_set()
        second.work(works=False)
        assert not replicas.working.is_set()


async def test_what_ends_one_relay_ends_the_process() -> None:
    """A queue with other arguments does not go away by itself."""
    cluster = Cluster("10.0.0.1:1", "10.0.0.2:1")
    task = asyncio.create_task(cluster.replicas().run())
    await cluster.made.wait()
    broken = cluster.relays["10.0.0.1:1"] if "10.0.0.1:1" in cluster.relays else next(iter(cluster.relays.values()))
    broken.breaks = TopologyConflict("queue ai-interactive")
    broken.told.set()
    async with asyncio.timeout(10):
        with pytest.raises(TopologyConflict):
            await task
    assert all(relay.ended.is_set() for relay in cluster.relays.values())


async def test_stopping_ends_every_relay() -> None:
    cluster = Cluster("10.0.0.1:1", "10.0.0.2:1")
    async with running(cluster.replicas()):
        await looked_again(cluster)
    assert all(relay.ended.is_set() for relay in cluster.relays.values())


async def test_only_names_stand_for_many() -> None:
    assert await look_up("jobs.internal:50051") == {"jobs.internal:50051"}
    assert "127.0.0.1:50051" in await look_up("dns:///localhost:50051")
    assert await look_up("dns:///no-such-name.invalid:50051") == frozenset()


async def test_a_relay_that_is_cancelled_from_within_ends_the_process_too() -> None:
    """Not by us: a library did, and nobody would notice a dispatcher without a relay."""
    cluster = Cluster("10.0.0.1:1")
    stop = asyncio.Event()

    async def run() -> None:
        async with background(stop, cluster.replicas()):
            await stop.wait()

    running_all = asyncio.create_task(run())
    await cluster.made.wait()
    relay = cluster.relays["10.0.0.1:1"]
    relay.breaks = asyncio.CancelledError()
    relay.told.set()
    async with asyncio.timeout(10):
        with pytest.raises(BrokenLoopError):
            await running_all
