"""The relay: claim, publish with confirm, settle, again (OB-2, OB-4).

    jobs ──ClaimEvents (long poll)──▶ relay ──publish, confirm──▶ broker
      ▲                                 │
      └──────────SettleEvents───────────┘

Claiming waits until the broker is reachable, so an outage uses up nobody's attempts and no claims. An event whose
confirm did not come is given back and published again with the same message id; the lock makes the double harmless.
Killed at any point, the relay leaves at worst claimed events, which the jobs service releases when the claim ends.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol
from uuid import uuid4

import structlog

from aijobs.backoff import Backoff
from aijobs.broker.port import BrokerUnavailable, MessageRefused, Publisher
from aijobs.errors import AijobsError, PermissionDenied, Unauthenticated
from aijobs.v1.outbox_service_pb2 import ClaimReleased, EventSettlement, OutboxEvent, Published, PublishFailed
from services.dispatcher.messages import UnusableEvent, to_message

POLL_WAIT = timedelta(seconds=20)
PUBLISH_TIMEOUT = timedelta(seconds=5)
#: Of a claim's time; later a confirm might come after somebody else has taken the event over.
PUBLISHABLE_SHARE = 0.5
log = structlog.get_logger()


class OutboxPort(Protocol):
    """The jobs service as the relay sees it."""

    async def claim(self, claim_token: str, limit: int, wait: timedelta) -> tuple[Sequence[OutboxEvent], timedelta]:
        """Claim events; returns them and how long the claim lasts.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        ...

    async def settle(self, claim_token: str, settlements: Sequence[EventSettlement]) -> Sequence[str]:
        """Settle events; returns the ids of those that the claim no longer holds.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        ...


class Relay:
    """Moves events from the outbox to the broker until cancelled."""

    name = "relay"

    def __init__(self, outbox: OutboxPort, publisher: Publisher, claim_size: int) -> None:
        self._outbox = outbox
        self._publisher = publisher
        self._claim_size = claim_size
        self._backoff = Backoff()
        #: Set while the broker is connected and the jobs service answers.
        self.working = asyncio.Event()

    async def run(self) -> None:
        """Relay until cancelled; then the batch in hand is finished and the open claim given back."""
        claim_token = _new_token()
        while True:
            try:
                await self._publisher.connect()
                events, lease = await self._claim(claim_token)
            except asyncio.CancelledError:
                await self._give_back(claim_token)
                raise
            except BrokerUnavailable:
                await self._wait("the broker cannot be reached")
                continue
            except (Unauthenticated, PermissionDenied) as error:
                await self._wait(f"the jobs service refuses us: {error.message}; check AIJOBS_TOKEN")
                continue
            except AijobsError as error:
                await self._wait(f"the jobs service does not answer: {error.message}")
                continue
            self._works()
            if events:
                batch = asyncio.ensure_future(self._publish_and_settle(claim_token, events, lease))
                try:
                    await asyncio.shield(batch)
                except asyncio.CancelledError:
                    await batch
                    raise
            claim_token = _new_token()

    async def _claim(self, claim_token: str) -> tuple[Sequence[OutboxEvent], timedelta]:
        # The first claim after trouble asks without waiting, so that a lost answer is found at once and readiness
        # does not wait for an event.
        wait = POLL_WAIT if self.working.is_set() else timedelta(0)
        return await self._outbox.claim(claim_token, self._claim_size, wait)

    async def _publish_and_settle(self, claim_token: str, events: Sequence[OutboxEvent], lease: timedelta) -> None:
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(lease.total_seconds() * PUBLISHABLE_SHARE):
                settlements = await asyncio.gather(*(self._publish(event) for event in events))
        except TimeoutError:
            log.warning("publishing took too long; the claim runs out", events=len(events))
            return
        left = lease.total_seconds() - (asyncio.get_running_loop().time() - started)
        await self._settle(claim_token, settlements, timedelta(seconds=left))

    async def _publish(self, event: OutboxEvent) -> EventSettlement:
        try:
            await self._publisher.publish(to_message(event), PUBLISH_TIMEOUT)
        except BrokerUnavailable:
            return EventSettlement(event_id=event.event_id, released=ClaimReleased())
        except UnusableEvent as error:
            log.error("event cannot be sent", event_id=event.event_id, error=str(error))
            failed = PublishFailed(reason="DISPATCH_UNUSABLE_EVENT", retryable=True)
            return EventSettlement(event_id=event.event_id, failed=failed)
        except MessageRefused as error:
            log.error("event refused by the broker", event_id=event.event_id, error=str(error))
            failed = PublishFailed(reason="DISPATCH_REFUSED", retryable=True)
            return EventSettlement(event_id=event.event_id, failed=failed)
        return EventSettlement(event_id=event.event_id, published=Published())

    async def _settle(self, claim_token: str, settlements: Sequence[EventSettlement], within: timedelta) -> None:
        """Settle, however often it takes while the claim lasts; afterwards the events are published once more."""
        try:
            async with asyncio.timeout(max(within.total_seconds(), 0)):
                lost = await self._settled(claim_token, settlements)
        except TimeoutError:
            log.warning("events not settled while their claim lasted", events=len(settlements))
            return
        if lost:
            log.warning("events settled too late", events=len(lost))

    async def _settled(self, claim_token: str, settlements: Sequence[EventSettlement]) -> Sequence[str]:
        backoff = Backoff()
        while True:
            try:
                return await self._outbox.settle(claim_token, settlements)
            except AijobsError as error:
                log.warning("events not settled yet", error=error.message)
            await backoff.wait()

    async def _give_back(self, claim_token: str) -> None:
        """Give back what the interrupted claim may have got, so that nobody waits for it to run out."""
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT.total_seconds()):
                events, _ = await self._outbox.claim(claim_token, self._claim_size, timedelta(0))
                if events:
                    released = [EventSettlement(event_id=event.event_id, released=ClaimReleased()) for event in events]
                    await self._outbox.settle(claim_token, released)
        except (AijobsError, TimeoutError):
            log.info("open claim not given back; it runs out by itself")

    def _works(self) -> None:
        self._backoff.reset()
        if not self.working.is_set():
            self.working.set()
            log.info("relaying events")

    async def _wait(self, why: str) -> None:
        if self.working.is_set():
            self.working.clear()
        log.warning("not relaying", why=why)
        await self._backoff.wait()


def _new_token() -> str:
    return uuid4().hex
