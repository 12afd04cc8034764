"""Ending claims whose dispatcher is gone, and looking for dead events and those that nobody can send (OB-3, OB-5).

A claim ends after its time at the latest. A dispatcher that was killed is noticed sooner: its open claim, and the calls
it makes while it publishes, are signs of life, and without one for the grace its events are given back. A database
that was away took no signs, so after a gap in our own looking everybody gets a full grace first. A dispatcher that was
taken for gone and is not publishes twice at worst, and the lock makes that harmless.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

import structlog

from aijobs import metrics
from aijobs.errors import Unavailable
from services.jobs.event_queries import EventQueries
from services.jobs.store import dispatchers, outbox, outbox_admin, ranks
from services.jobs.store.database import Database, Transaction
from services.jobs.store.outbox import EventStatus
from services.jobs.wakeups import Wakeups

#: How often signs of life are looked at.
LOOK_INTERVAL = timedelta(seconds=1)
#: Events in one transaction.
CHUNK = 100
#: Dispatchers that were not seen for so long are forgotten, and virtual times that lie so far back.
FORGET_DISPATCHER_AFTER = timedelta(days=1)
FORGET_VIRTUAL_TIME_AFTER = timedelta(hours=1)
FORGET_CHUNK = 100
#: Dead events are counted no further.
MOST_DEAD = 10_000
RELEASED = metrics.counter("claims_released", "Events given back because their claim ended", "reason")
DEAD = metrics.gauge("outbox_events_dead", "Dead events, counted to 10,000: they wait for an operator")
PARKED = metrics.gauge("outbox_events_parked", "Pending events of types that no dispatcher can send", "event_type")
log = structlog.get_logger()


class ClaimRelease:
    """Gives back events; `run` is the loop.

    Args:
        database: where the events are.
        wakeups: who is told that there are events again.
        event_queries: knows what no dispatcher can send.
        grace: how long a dispatcher may give no sign of life.
        interval: between two looks for claims whose time is over.

    """

    name = "claim release"

    def __init__(
        self,
        database: Database,
        wakeups: Wakeups,
        event_queries: EventQueries,
        *,
        grace: timedelta,
        interval: timedelta,
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._event_queries = event_queries
        self._grace = grace
        self._interval = interval
        #: Since when, by the loop's clock, signs of life have been looked at without a gap.
        self._looking_since: float | None = None
        self._looked_at = 0.0
        self._parked: dict[str, int] = {}

    async def run(self) -> None:
        """Release until cancelled. Never ends by a fault of the database."""
        loop = asyncio.get_running_loop()
        rested_at = loop.time()
        pause = min(LOOK_INTERVAL, self._interval, self._grace / 2).total_seconds()
        while True:
            await asyncio.sleep(pause)
            try:
                await self.release_orphaned()
                if loop.time() - rested_at >= self._interval.total_seconds():
                    rested_at = loop.time()
                    await self.release_expired()
                    await self.look_for_dead()
                    await self.look_for_parked()
                    await self.forget()
            except Unavailable:
                log.warning("claims not released: the database cannot be reached")

    async def release_expired(self) -> int:
        """Release every claim whose time is over, and return how many events that were.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._release("expired", partial(outbox.release_expired, limit=CHUNK))

    async def release_orphaned(self) -> int:
        """Release what dispatchers hold that gave no sign of life for the grace, and return how many events that were.

        Raises:
            Unavailable: the database cannot be reached.

        """
        now = asyncio.get_running_loop().time()
        if self._looking_since is None or now - self._looked_at > self._grace.total_seconds():
            self._looking_since = now
        judges = now - self._looking_since >= self._grace.total_seconds()
        released = await self._release("orphaned", partial(self._release_unseen, began=now, judges=judges))
        # Only a look that the database answered counts: else dispatchers could not give signs of life either.
        self._looked_at = asyncio.get_running_loop().time()
        return released

    async def look_for_dead(self) -> None:
        """Count the dead events, for an alarm (OB-3).

        Raises:
            Unavailable: the database cannot be reached.

        """
        count = partial(outbox_admin.counts, statuses=[EventStatus.DEAD], most=MOST_DEAD)
        DEAD.set((await self._database.read(count))[EventStatus.DEAD])

    async def look_for_parked(self) -> None:
        """Count the events of types that no dispatcher can send, and warn of new ones (OB-5, ruling 21).

        Raises:
            Unavailable: the database cannot be reached.

        """
        parked = await self._event_queries.parked()
        for event_type in self._parked.keys() | parked.keys():
            count = parked.get(event_type, 0)
            PARKED.labels(event_type).set(count)
            if count > self._parked.get(event_type, 0):
                log.warning("events of a type that no dispatcher can send", event_type=event_type, events=count)
        self._parked = dict(parked)

    async def forget(self) -> None:
        """Delete dispatchers that are long gone, and virtual times that say nothing any more.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> None:
            await dispatchers.forget(tx, unseen=FORGET_DISPATCHER_AFTER, limit=FORGET_CHUNK)
            await ranks.forget(tx, older=FORGET_VIRTUAL_TIME_AFTER, limit=FORGET_CHUNK)

        await self._database.write(work)

    async def _release_unseen(self, tx: Transaction, *, began: float, judges: bool) -> int:
        gone = await dispatchers.lock_unseen(tx, self._grace)
        if not judges:
            return 0
        if asyncio.get_running_loop().time() - began > self._grace.total_seconds():
            # The database let this very look wait, and their signs of life with it.
            self._looking_since = None
            return 0
        return await outbox.release_held(tx, gone, limit=CHUNK) if gone else 0

    async def _release(self, reason: str, chunk: Callable[[Transaction], Awaitable[int]]) -> int:
        total = 0
        while True:
            released = await self._database.write(chunk)
            total += released
            if released < CHUNK:
                break
        if total:
            RELEASED.labels(reason).inc(total)
            log.warning("claims released", reason=reason, events=total)
            self._wakeups.events.give()
        return total
