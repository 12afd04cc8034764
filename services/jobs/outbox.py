"""Handing outbox events to dispatchers (OB-1…OB-3, OB-6, QU-3).

A claim waits for events, woken by the commit that writes one; a poll once a second finds what other replicas wrote. Who
publishes is decided by the claim's token; a dispatcher whose claim ended settles nothing.

The order of a queue is kept here, so its queue in the broker has to stay shallow: what is there cannot be overtaken.
Each claim says how many messages are ready there, and gets at most what is missing to the limit, counted under the lock
of the queue's row:

    credit = limit - ready - claimed - published since the dispatcher looked
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, islice, zip_longest

import structlog

from aijobs import metrics
from aijobs.definition import Queue
from aijobs.errors import AijobsError, ClaimLost
from services.jobs.events import EventType
from services.jobs.store import dispatchers, outbox, queues
from services.jobs.store.database import Database, Transaction
from services.jobs.store.outbox import ClaimState, EventRow, EventStatus, Lane, Settlement
from services.jobs.wakeups import Wakeups

#: The fallback poll of a waiting claim; the commit's wake-up is what normally ends the wait.
POLL_INTERVAL = timedelta(seconds=1)
#: A waiting claim is a sign of life of its dispatcher, stored at most this often.
SIGN_INTERVAL = timedelta(milliseconds=500)
#: How long a claim still waits once events are withheld for want of credit: the dispatcher has to look again.
WITHHELD_WAIT = timedelta(milliseconds=100)
#: How long a claim pauses that found every event in the hands of another one.
CONTENDED_WAIT = timedelta(milliseconds=10)
#: A failure that is the event's own fault makes it wait, and the third one makes it dead (OB-3).
MOST_ATTEMPTS = 3
FIRST_BACKOFF = timedelta(seconds=1)
#: An event that was given back waits as long, so that one that nobody can send is no hot loop.
RELEASE_DELAY = timedelta(seconds=1)
#: Where an operator goes on.
SEE = "aijobs outbox list --status dead"
DIED = metrics.counter("outbox_events_died", "Events that became dead: they wait for an operator")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The broker confirmed the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed:
    """The event itself could not be published."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Given back unpublished, through no fault of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRequest:
    """What became of one claimed event."""

    event_id: str
    result: Published | PublishFailed | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A dispatcher's wish for events.

    Attributes:
        token: made by the dispatcher; the same one gets the same events.
        dispatcher_id: the dispatcher process.
        event_types: what it can send.
        ready: how many messages are ready in the broker, by queue; queues that it does not know are missing.
        limit: events at most; 0: no others than the token holds already, and the call does not wait.
        wait: how long to wait for the first one.

    """

    token: str
    dispatcher_id: str
    event_types: Sequence[str]
    ready: Mapping[str, int]
    limit: int
    wait: timedelta


@dataclass(frozen=True, slots=True)
class _Found:
    """What one look found.

    Attributes:
        events: claimed ones.
        withheld: lanes that have events, but no credit.
        contended: there were events, but another claim was at all of them just then.

    """

    events: Sequence[EventRow] = ()
    withheld: frozenset[Lane] = frozenset()
    contended: bool = False


class Outbox:
    """Serves dispatchers.

    Args:
        database: where the events are.
        wakeups: who wakes a waiting claim.
        claim_time: how long a claim lasts.
        queue_depth: messages of a queue that may wait in the broker.

    """

    def __init__(self, database: Database, wakeups: Wakeups, *, claim_time: timedelta, queue_depth: int) -> None:
        self._database = database
        self._wakeups = wakeups
        self._queue_depth = queue_depth
        self.claim_time = claim_time

    async def claim(self, claim: Claim) -> Sequence[EventRow]:
        """Claim due events of some types, in the order of their ranks, waiting for the first one.

        Raises:
            Unavailable: the database cannot be reached.

        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        signed_at: float | None = None
        until = asked_at + claim.wait.total_seconds()
        if not claim.limit:
            return await self._database.write(lambda tx: self._held(tx, claim))
        withheld: frozenset[Lane] = frozenset()
        while True:
            seen = self._wakeups.events.count
            signs = signed_at is None or loop.time() - signed_at >= SIGN_INTERVAL.total_seconds()
            look = partial(
                self._look,
                claim=claim,
                lanes=_lanes(claim.event_types) - withheld,
                age=timedelta(seconds=loop.time() - asked_at),
                signs=signs,
                # What was seen in the broker is told once: later it is no news.
                reports=signed_at is None,
            )
            found = await self._database.write(look)
            signed_at = loop.time() if signs else signed_at
            if found.withheld and not withheld:
                until = min(until, loop.time() + WITHHELD_WAIT.total_seconds())
            withheld |= found.withheld
            left = until - loop.time()
            if found.events or left <= 0:
                return found.events
            if found.contended:
                await asyncio.sleep(CONTENDED_WAIT.total_seconds())
                continue
            jittered = POLL_INTERVAL * random.uniform(0.8, 1.2)  # noqa: S311 - spreads replicas, guards nothing
            await self._wakeups.events.beyond(seen, min(jittered, timedelta(seconds=left)))

    async def _look(
        self, tx: Transaction, *, claim: Claim, lanes: frozenset[Lane], age: timedelta, signs: bool, reports: bool
    ) -> _Found:
        if signs:
            await dispatchers.sign(tx, claim.dispatcher_id, claim.event_types)
        if reports:
            await queues.report(tx, claim.ready)
        # The answer to this very claim may have been lost. What it holds is claimed anew, so that the answer's lease is
        # true.
        held = await outbox.renew(tx, claim.token, self.claim_time)
        if held:
            return _Found(held)
        waiting = await outbox.waiting(tx, dict.fromkeys(lanes, 1), claim_token=claim.token)
        if not waiting:
            return _Found()
        credit = await self._credit(tx, {lane.queue for lane in waiting if lane.queue}, claim.ready, age)
        # The call may be a late copy of one that got its events while this one waited for the queue.
        held = await outbox.renew(tx, claim.token, self.claim_time) if credit else []
        if held:
            return _Found(held)
        credit[""] = claim.limit
        withheld = frozenset(lane for lane in waiting if credit.get(lane.queue) == 0)
        open_lanes = {lane: min(credit[lane.queue], claim.limit) for lane in waiting if credit.get(lane.queue)}
        # Looked at again, since whoever held the queue's row before may have claimed them.
        found = await outbox.waiting(tx, open_lanes, claim_token=claim.token) if open_lanes else {}
        ids = list(islice(_in_turns(found.values()), claim.limit))
        if not ids:
            return _Found(withheld=withheld)
        events = await outbox.claim(
            tx, ids, claim_token=claim.token, dispatcher_id=claim.dispatcher_id, span=self.claim_time
        )
        return _Found(events, withheld, contended=not events)

    async def _held(self, tx: Transaction, claim: Claim) -> Sequence[EventRow]:
        await dispatchers.sign(tx, claim.dispatcher_id, claim.event_types)
        await queues.report(tx, claim.ready)
        return await outbox.renew(tx, claim.token, self.claim_time)

    async def _credit(
        self, tx: Transaction, names: set[str], ready: Mapping[str, int], age: timedelta
    ) -> dict[str, int]:
        """Return how many more messages each queue may have. Paused ones are missing. Holds their rows.

        Args:
            tx: the transaction.
            names: the queues.
            ready: how many messages each has, as the dispatcher saw it.
            age: how long ago that was.

        """
        if not names:
            return {}
        rows = await queues.lock(tx, names)
        on_their_way = await outbox.on_their_way(tx, sorted(names), since=age)
        return {
            name: max(self._queue_depth - ready.get(name, 0) - on_their_way.get(name, 0), 0)
            for name, row in rows.items()
            if row.paused_at is None
        }

    async def settle(self, claim_token: str, batch: Sequence[SettleRequest]) -> list[AijobsError | None]:
        """Store what became of claimed events; None per item means stored, now or by an earlier call.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._database.write(lambda tx: self._settle(tx, claim_token, batch))

    async def _settle(
        self, tx: Transaction, claim_token: str, batch: Sequence[SettleRequest]
    ) -> list[AijobsError | None]:
        states = await outbox.claim_states(tx, [item.event_id for item in batch])
        results: list[AijobsError | None] = []
        settlements: dict[str, Settlement] = {}
        for item in batch:
            state = states.get(item.event_id)
            if state is None or state.claim_token != claim_token:
                results.append(ClaimLost(f"event {item.event_id[:64]} is not held by this claim"))
                continue
            results.append(None)
            if state.status == EventStatus.PROCESSING and item.event_id not in settlements:
                settlements[item.event_id] = _settlement(item, state)
        await outbox.settle(tx, claim_token, list(settlements.values()))
        dead = [settled for settled in settlements.values() if settled.status == EventStatus.DEAD]
        if dead:
            tx.after_commit(lambda: _tell_dead(dead))
        return results


def _tell_dead(dead: Sequence[Settlement]) -> None:
    DIED.inc(len(dead))
    for event in dead:
        log.error("event dead", event_id=event.event_id, reason=event.last_error, attempts=event.attempt_count, see=SEE)


def _settlement(item: SettleRequest, state: ClaimState) -> Settlement:
    match item.result:
        case Published():
            return Settlement(
                event_id=item.event_id,
                status=EventStatus.PUBLISHED,
                attempt_count=state.attempt_count,
                last_error=None,
            )
        case PublishFailed(reason=reason, retryable=retryable):
            attempts = state.attempt_count + 1
            dead = attempts >= MOST_ATTEMPTS or not retryable
            return Settlement(
                event_id=item.event_id,
                status=EventStatus.DEAD if dead else EventStatus.SCHEDULED,
                attempt_count=attempts,
                last_error=reason,
                delay=timedelta(0) if dead else FIRST_BACKOFF * 2**state.attempt_count,
            )
        case Released():
            return Settlement(
                event_id=item.event_id,
                status=EventStatus.SCHEDULED,
                attempt_count=state.attempt_count,
                last_error="DISPATCH_UNAVAILABLE",
                delay=RELEASE_DELAY,
            )


def _lanes(event_types: Iterable[str]) -> frozenset[Lane]:
    """Return where events of these types wait: dispatches in their queues, all others in none."""
    return frozenset(
        Lane(queue, event_type)
        for event_type in event_types
        for queue in (Queue if event_type == EventType.ENQUEUE else ("",))
    )


def _in_turns(lanes: Iterable[Sequence[int]]) -> Iterable[int]:
    """Take one event of each lane in turn, in a new order of lanes each time, so that none is starved."""
    shuffled = list(lanes)
    random.shuffle(shuffled)
    return (event_id for event_id in chain.from_iterable(zip_longest(*shuffled)) if event_id is not None)
