"""Handing outbox events to dispatchers (OB-1…OB-3, OB-6).

A claim waits for events, woken by the commit that writes one; a poll once a second finds what other replicas wrote and
what becomes due. Who publishes is decided by the claim's token; a dispatcher whose claim ended settles nothing.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog

from aijobs.definition import Queue
from aijobs.errors import AijobsError, ClaimLost, Unavailable
from services.jobs.store import outbox, queues
from services.jobs.store.database import Database, Transaction
from services.jobs.store.outbox import ClaimState, EventRow, EventStatus, Settlement
from services.jobs.wakeups import Wakeups

#: The fallback poll of a waiting claim; the commit's wake-up is what normally ends the wait.
POLL_INTERVAL = timedelta(seconds=1)
#: A failure that is the event's own fault makes it wait, and the third one makes it dead (OB-3).
MOST_ATTEMPTS = 3
FIRST_BACKOFF = timedelta(seconds=1)
#: An event that was given back waits as long, so that one that nobody can send is no hot loop.
RELEASE_DELAY = timedelta(seconds=1)
#: What is claimed from: the queues, and the events that belong to none.
QUEUES = ("", *Queue)
#: Events in one transaction that releases expired claims.
RELEASE_CHUNK = 100
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


class Outbox:
    """Serves dispatchers; `run` is the loop that releases claims whose dispatcher is gone."""

    name = "claim release"

    def __init__(
        self, database: Database, wakeups: Wakeups, *, claim_time: timedelta, release_interval: timedelta
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._release_interval = release_interval
        self.claim_time = claim_time

    async def claim(
        self, *, claim_token: str, dispatcher_id: str, event_types: Sequence[str], limit: int, wait: timedelta
    ) -> list[EventRow]:
        """Claim up to `limit` due events of these types, waiting up to `wait` for the first one.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> list[EventRow]:
            # The answer to this very claim may have been lost. What it holds is claimed anew, so that the answer's
            # lease is true.
            held = await outbox.renew(tx, claim_token, self.claim_time)
            if held:
                return held
            paused = await queues.paused(tx)
            # In a new order each time, so that a backlog in one queue holds up none of the others.
            open_queues = [queue for queue in QUEUES if queue not in paused]
            random.shuffle(open_queues)
            return await outbox.claim(
                tx,
                claim_token=claim_token,
                dispatcher_id=dispatcher_id,
                event_types=event_types,
                queues=open_queues,
                limit=limit,
                span=self.claim_time,
            )

        loop = asyncio.get_running_loop()
        until = loop.time() + wait.total_seconds()
        while True:
            seen = self._wakeups.events.count
            events = await self._database.write(work)
            left = until - loop.time()
            if events or left <= 0:
                return events
            jittered = POLL_INTERVAL * random.uniform(0.8, 1.2)  # noqa: S311 - spreads replicas, guards nothing
            await self._wakeups.events.beyond(seen, min(jittered, timedelta(seconds=left)))

    async def settle(self, claim_token: str, batch: Sequence[SettleRequest]) -> list[AijobsError | None]:
        """Store what became of claimed events; None per item means stored, now or by an earlier call.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._database.write(lambda tx: self._settle(tx, claim_token, batch))

    async def run(self) -> None:
        """Release expired claims until cancelled. Never ends by a fault of the database."""
        while True:
            await asyncio.sleep(self._release_interval.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311
            try:
                released = await self._release_expired()
            except Unavailable:
                log.warning("expired claims not released: the database cannot be reached")
                continue
            if released:
                log.warning("expired claims released", events=released)
                self._wakeups.events.give()

    async def _release_expired(self) -> int:
        """Release every expired claim, in small transactions, and return how many events that were."""
        total = 0
        while True:
            released = await self._database.write(lambda tx: outbox.release_expired(tx, RELEASE_CHUNK))
            total += released
            if released < RELEASE_CHUNK:
                return total

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
    for event in dead:
        log.error("event dead", event_id=event.event_id, reason=event.last_error, attempts=event.attempt_count)


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
                status=EventStatus.DEAD if dead else EventStatus.PENDING,
                attempt_count=attempts,
                last_error=reason,
                delay=timedelta(0) if dead else FIRST_BACKOFF * 2**state.attempt_count,
            )
        case Released():
            return Settlement(
                event_id=item.event_id,
                status=EventStatus.PENDING,
                attempt_count=state.attempt_count,
                last_error="DISPATCH_UNAVAILABLE",
                delay=RELEASE_DELAY,
            )
