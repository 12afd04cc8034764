"""One relay for each replica of the jobs service, so that every commit wakes a claim that waits beside it (OB-6).

`dns:///name:port` stands for as many replicas as the name has addresses; they are looked up again and again. Any other
address is one replica.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog

from aijobs.rpc.address import Address
from services.dispatcher.relay import Relay

MANY = "dns:///"
LOOKUP_INTERVAL = timedelta(seconds=10)
LOOKUP_TIMEOUT = timedelta(seconds=5)
#: While no address is known at all.
FIRST_LOOKUP_INTERVAL = timedelta(seconds=1)
log = structlog.get_logger()

Lookup = Callable[[str], Awaitable[frozenset[str]]]


async def look_up(address: str) -> frozenset[str]:
    """Return the addresses of the replicas behind an address, as `host:port`; none if the name cannot be resolved."""
    if not address.startswith(MANY):
        return frozenset({address})
    wanted = Address.parse(address.removeprefix(MANY))
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT.total_seconds()):
            found = await asyncio.get_running_loop().getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return frozenset()
    return frozenset(str(Address(host=str(entry[4][0]), port=wanted.port)) for entry in found)


class Replicas:
    """A loop that keeps one relay running for each replica.

    Args:
        address: of the jobs service.
        make_relay: makes the relay of a replica from its address; the relay calls back when it begins or ceases to
            work.
        lookup: finds the replicas.
        interval: between two lookups.

    """

    name = "relays"

    def __init__(
        self,
        address: str,
        make_relay: Callable[[str, Callable[[], None]], Relay],
        *,
        lookup: Lookup = look_up,
        interval: timedelta = LOOKUP_INTERVAL,
    ) -> None:
        self._address = address
        self._make_relay = make_relay
        self._lookup = lookup
        self._interval = interval
        self._relays: dict[str, Relay] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        #: Set while at least one relay works.
        self.working = asyncio.Event()

    async def run(self) -> None:
        """Relay until cancelled; then each relay finishes what it has in hand.

        Raises:
            TopologyConflict: from a relay.

        """
        try:
            while True:
                self._follow(await self._lookup(self._address))
                await self._watch()
        finally:
            tasks = {*self._tasks.values(), *self._ending}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, found: frozenset[str]) -> None:
        """Start relays of new replicas, and end those of replicas that are gone. To find none at all says nothing."""
        for address in found - self._tasks.keys():
            log.info("relaying for a replica", address=address)
            self._relays[address] = self._make_relay(address, self._look)
            self._tasks[address] = asyncio.create_task(self._relays[address].run())
        for address in self._tasks.keys() - found if found else ():
            log.info("replica is gone", address=address)
            self._relays.pop(address).retire()
            self._ending.add(self._tasks.pop(address))
        self._look()

    async def _watch(self) -> None:
        """Wait for the next lookup; a relay that ends by itself ends all of them."""
        if not self._tasks:
            await asyncio.sleep(min(self._interval, FIRST_LOOKUP_INTERVAL).total_seconds())
            return
        present = {*self._tasks.values(), *self._ending}
        ended, _ = await asyncio.wait(
            present, timeout=self._interval.total_seconds(), return_when=asyncio.FIRST_COMPLETED
        )
        for task in ended:
            task.result()
            self._ending.discard(task)

    def _look(self) -> None:
        if any(relay.working.is_set() for relay in self._relays.values()):
            self.working.set()
        else:
            self.working.clear()
