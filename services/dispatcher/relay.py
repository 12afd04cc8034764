"""The relay: look, claim, publish with confirm, settle, again (OB-2, OB-4).

    jobs ──ClaimEvents (long poll)──▶ relay ──publish, confirm──▶ broker
      ▲                                 │ ▲──how many are ready?─────┘
      └──────────SettleEvents───────────┘

Every claim says how many messages wait in the broker, since the jobs service gives no queue more than it has room for;
and it is a sign of life. While a batch takes long to publish, empty claims give that sign: a dispatcher that is silent
for some seconds loses what it has claimed. A claim whose answer was lost is asked for at any replica, since its own may
be gone.

Claiming waits until the broker is reachable, so an outage uses up nobody's attempts and no claims. An event whose
confirm did not come is given back and published again with the same message id; the lock makes the double harmless.
Killed at any point, the relay leaves at worst claimed events, which the jobs service releases when the claim ends.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import structlog

from aijobs.backoff import Backoff
from aijobs.broker.port import BrokerUnavailable, MessageRefused, Publisher
from aijobs.errors import AijobsError, PermissionDenied, Unauthenticated
from aijobs.logs import place_of
from services.dispatcher.messages import ClaimedEvent, UnusableEvent, to_message

#: How long a claim waits for events; the depths that it reported grow old meanwhile.
POLL_WAIT = timedelta(seconds=5)
SIGN_INTERVAL = timedelta(seconds=1)
DEPTHS_TIMEOUT = timedelta(seconds=2)
PUBLISH_TIMEOUT = timedelta(seconds=5)
#: How long the end of the process waits for the batch in hand.
FINISH_WITHIN = timedelta(seconds=5)
#: Of a claim's time.
PUBLISHABLE_SHARE = 0.5
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Claimed events, and how long the claim lasts from the moment it was asked for."""

    events: Sequence[ClaimedEvent]
    lease: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The broker confirmed the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed:
    """The event itself could not be published: uses up one of its attempts."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Given back, through no fault of the event's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What became of one event."""

    event_id: str
    result: Published | PublishFailed | Released


class OutboxPort(Protocol):
    """The jobs service as the relay sees it."""

    async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
        """Claim up to `limit` events, waiting for the first one.

        Args:
            claim_token: fresh.
            limit: events at most.
            wait: how long to wait for the first one.
            ready: messages that wait in the broker, by queue.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        ...

    async def held(self, claim_token: str) -> Claim:
        """Return the events that an earlier claim holds, from any replica, and say that we are alive.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...

    async def settle(self, claim_token: str, settlements: Sequence[Settlement]) -> Sequence[str]:
        """Settle events; returns the ids of those that the claim no longer holds.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        ...


def _nobody() -> None:
    """Tell nobody."""


class Relay:
    """Moves events from the outbox to the broker until retired or cancelled."""

    def __init__(
        self, outbox: OutboxPort, publisher: Publisher, claim_size: int, *, changed: Callable[[], None] = _nobody
    ) -> None:
        self._outbox = outbox
        self._publisher = publisher
        self._claim_size = claim_size
        self._backoff = Backoff()
        #: Token of a claim that was asked for and not answered yet.
        self._open_claim: str | None = None
        self._retired = False
        #: Set while the broker is connected and the jobs service answers.
        self.working = asyncio.Event()
        #: Called when that changes.
        self._changed = changed

    async def run(self) -> None:
        """Relay until retired or cancelled; then the batch in hand is finished and an open claim given back."""
        try:
            while not self._retired:
                await self._relay_once()
        finally:
            self._works_no_more()
            await self._give_back()
            await self._outbox.close()

    def retire(self) -> None:
        """Come to an end after what is being done now: the replica is gone, but the process lives on."""
        self._retired = True

    async def _relay_once(self) -> None:
        try:
            await self._publisher.connect()
            ready = await self._publisher.depths(DEPTHS_TIMEOUT)
            claim_token, claim = await self._claim(ready)
        except BrokerUnavailable as error:
            await self._wait(str(error))
        except (Unauthenticated, PermissionDenied) as error:
            await self._wait(f"the jobs service refuses us: {error.message}; check AIJOBS_TOKEN")
        except AijobsError as error:
            await self._wait(f"the jobs service does not answer: {error.message}")
        else:
            if claim.events and not await self._to_its_end(self._publish_and_settle(claim_token, claim)):
                await self._wait("the broker takes no message")
            else:
                self._works()

    async def _claim(self, ready: Mapping[str, int]) -> tuple[str, Claim]:
        """Claim with a fresh token, unless a claim whose answer is still owed holds something."""
        if (owed := self._open_claim) is not None:
            claim = await self._outbox.held(owed)
            self._open_claim = None
            if claim.events:
                return owed, claim
        claim_token = self._open_claim = uuid4().hex
        # The first claim after trouble does not wait, so that readiness does not wait for an event.
        wait = POLL_WAIT if self.working.is_set() else timedelta(0)
        claim = await self._outbox.claim(claim_token, self._claim_size, wait, ready)
        self._open_claim = None
        return claim_token, claim

    @staticmethod
    async def _to_its_end(work: Coroutine[Any, Any, bool]) -> bool:
        """Do work that is finished before a cancellation takes effect, if that does not take long."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=FINISH_WITHIN.total_seconds())
            if task.cancel():
                log.warning("batch left behind; its claim runs out by itself")
            raise

    async def _publish_and_settle(self, claim_token: str, claim: Claim) -> bool:
        """Publish and settle claimed events; False if the broker took none of them."""
        started = asyncio.get_running_loop().time()
        living = asyncio.create_task(self._give_signs_of_life())
        try:
            settlements = await self._publish_all(claim)
            spent = timedelta(seconds=asyncio.get_running_loop().time() - started)
            await self._settle(claim_token, settlements, claim.lease - spent)
        finally:
            living.cancel()
        return any(not isinstance(settlement.result, Released) for settlement in settlements)

    async def _publish_all(self, claim: Claim) -> Sequence[Settlement]:
        publishing = [asyncio.ensure_future(self._publish(event)) for event in claim.events]
        # Later a confirm might come after somebody else has taken the event over.
        _, late = await asyncio.wait(publishing, timeout=claim.lease.total_seconds() * PUBLISHABLE_SHARE)
        for task in late:
            task.cancel()
        if late:
            log.warning("publishing took too long; the rest is given back", events=len(late))
            await asyncio.wait(late)
        return [
            Settlement(event_id=event.event_id, result=Released()) if task.cancelled() else task.result()
            for event, task in zip(claim.events, publishing, strict=True)
        ]

    async def _give_signs_of_life(self) -> None:
        """Tell the jobs service that we still work on what we claimed."""
        while True:
            await asyncio.sleep(SIGN_INTERVAL.total_seconds())
            try:
                await self._outbox.held(uuid4().hex)
            except AijobsError as error:
                log.debug("no sign of life given", error=error.message)

    async def _publish(self, event: ClaimedEvent) -> Settlement:
        try:
            await self._publisher.publish(to_message(event), PUBLISH_TIMEOUT)
        except BrokerUnavailable as error:
            log.debug("event not published", event_id=event.event_id, error=str(error))
            return Settlement(event_id=event.event_id, result=Released())
        except UnusableEvent as error:
            log.error("event cannot be sent", event_id=event.event_id, error=str(error))
            return Settlement(event_id=event.event_id, result=PublishFailed(reason="DISPATCH_UNUSABLE_EVENT"))
        except MessageRefused as error:
            log.error("event refused by the broker", event_id=event.event_id, error=str(error))
            return Settlement(event_id=event.event_id, result=PublishFailed(reason="DISPATCH_REFUSED"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not take the batch along
            log.error("event not published", event_id=event.event_id, error=place_of(error))
            return Settlement(event_id=event.event_id, result=PublishFailed(reason="DISPATCH_INTERNAL"))
        return Settlement(event_id=event.event_id, result=Published())

    async def _settle(self, claim_token: str, settlements: Sequence[Settlement], within: timedelta) -> None:
        """Settle, however often it takes while the claim lasts; afterwards the events are published once more."""
        try:
            async with asyncio.timeout(max(within.total_seconds(), 0)):
                lost = await self._settled(claim_token, settlements)
        except TimeoutError:
            log.warning("events not settled while their claim lasted", events=len(settlements))
            return
        if lost:
            log.warning("events settled too late", events=len(lost))

    async def _settled(self, claim_token: str, settlements: Sequence[Settlement]) -> Sequence[str]:
        backoff = Backoff()
        while True:
            try:
                return await self._outbox.settle(claim_token, settlements)
            except AijobsError as error:
                log.warning("events not settled yet", error=error.message)
            await backoff.wait()

    async def _give_back(self) -> None:
        """Give back what an interrupted claim may have got, so that nobody waits for it to run out."""
        if self._open_claim is None:
            return
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT.total_seconds()):
                claim = await self._outbox.held(self._open_claim)
                if claim.events:
                    released = [Settlement(event_id=event.event_id, result=Released()) for event in claim.events]
                    await self._outbox.settle(self._open_claim, released)
        except (AijobsError, TimeoutError):
            log.info("open claim not given back; it runs out by itself")

    def _works(self) -> None:
        self._backoff.reset()
        if not self.working.is_set():
            self.working.set()
            self._changed()
            log.info("relaying events")

    def _works_no_more(self) -> None:
        if self.working.is_set():
            self.working.clear()
            self._changed()

    async def _wait(self, why: str) -> None:
        self._works_no_more()
        log.warning("not relaying", why=why)
        await self._backoff.wait()
