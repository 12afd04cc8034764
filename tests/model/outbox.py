"""What the jobs service does for dispatchers (`services.jobs.outbox`, `services.jobs.store.outbox`)."""

from collections.abc import Iterator

from services.jobs.outbox import MOST_ATTEMPTS
from services.jobs.store.outbox import EventStatus
from tests.model.flaws import Flaw
from tests.model.world import Event, Request, Settlement, World, put


class Outbox:
    """The claims and settlements of enqueue events."""

    def __init__(self, flaws: frozenset[Flaw] = frozenset()) -> None:
        self._flaws = flaws

    def claim(self, world: World, token: str) -> Iterator[tuple[World, int]]:
        """Claim one event: that which the token holds already, else any that is due (`Outbox.claim`, `store.outbox`).

        None that was settled under this very token: the claim is a late copy then.
        """
        for event in world.events:
            if event.status == EventStatus.PROCESSING and event.token == token:
                yield world, event.number
                return
        if world.paused:
            return
        for index, event in enumerate(world.events):
            settled = event.token == token and Flaw.SETTLED_EVENT_CLAIMED_AGAIN not in self._flaws
            if event.status == EventStatus.PENDING and not event.delayed and not settled:
                claimed = event._replace(status=EventStatus.PROCESSING, token=token)
                if Flaw.ATTEMPT_COUNTED_AT_CLAIM in self._flaws:
                    claimed = claimed._replace(attempts=event.attempts + 1)
                yield world._replace(events=put(world.events, index, claimed)), event.number

    def settle(self, world: World, request: Request) -> World:
        """Settle an event that the request's token holds; a repeat changes nothing (`Outbox._settle`)."""
        for index, event in enumerate(world.events):
            if event.number != request.event or event.status != EventStatus.PROCESSING:
                continue
            if event.token != request.token:
                if Flaw.SETTLE_WITHOUT_TOKEN not in self._flaws:
                    continue
                world = world.blame("an event was settled by a claim that had ended")
            return world._replace(events=put(world.events, index, _settled(event, request.settlement)))
        return world

    def release(self, world: World, index: int) -> World:
        """Give an event back whose claim has ended (`store.outbox.release_expired`)."""
        released = world.events[index]._replace(status=EventStatus.PENDING, token="")
        return world._replace(events=put(world.events, index, released))


def _settled(event: Event, settlement: Settlement) -> Event:
    match settlement:
        case "published":
            return event._replace(status=EventStatus.PUBLISHED)
        case "failed":
            dead = event.attempts + 1 >= MOST_ATTEMPTS
            return event._replace(status=EventStatus.DEAD if dead else EventStatus.PENDING, attempts=event.attempts + 1)
        case _:
            return event._replace(status=EventStatus.PENDING)
