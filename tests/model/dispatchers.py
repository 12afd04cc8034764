"""What dispatchers do (`services.dispatcher.relay`), and what becomes of their late requests.

idle ──claimed──▶ holds ──published, failed or released──▶ settles ──settled──▶ idle
"""

from collections.abc import Iterator

from tests.model.explorer import Step
from tests.model.outbox import Outbox
from tests.model.setting import IN_FLIGHT, Setting, in_flight
from tests.model.world import Dispatcher, Request, World, claim_tokens, fresh, put, without

Steps = Iterator[Step[World]]


class DispatcherSteps:
    """The dispatchers of one setting."""

    def __init__(self, setting: Setting, outbox: Outbox) -> None:
        self._setting = setting
        self._outbox = outbox

    def steps(self, world: World) -> Steps:
        """Return what dispatchers can do next."""
        for index, dispatcher in enumerate(world.dispatchers):
            match dispatcher.stage:
                case "idle" | "claims":
                    yield from self._claim(world, index, dispatcher)
                case "holds":
                    yield from self._publish(world, index, dispatcher)
                case "settles":
                    yield from self._settle(world, index, dispatcher)
            if dispatcher.stage != "idle" and (worse := self._setting.fault(world, "dispatcher")):
                # All that is left of it is its claim.
                yield Step(f"{_name(index)} dies and starts again", True, _with(worse, index, Dispatcher()))
        for request in set(world.late):
            yield from self._late(world, request)

    def _claim(self, world: World, index: int, dispatcher: Dispatcher) -> Steps:
        # A claim whose answer is owed is asked for again with its own token.
        token = dispatcher.token or fresh(claim_tokens(world))
        for after, number in self._outbox.claim(world, token):
            holding = _with(after, index, Dispatcher("holds", token, number))
            yield Step(f"{_name(index)} claims event {number}", False, holding)
        if worse := self._setting.fault(world, "late"):
            worse = worse._replace(late=(*worse.late, Request("claim", token)))
            claiming = _with(worse, index, Dispatcher("claims", token))
            yield Step(f"a claim of {_name(index)} gets no answer", True, claiming)

    def _publish(self, world: World, index: int, dispatcher: Dispatcher) -> Steps:
        who, number = _name(index), dispatcher.event
        published = dispatcher._replace(stage="settles", settlement="published")
        failed = published._replace(settlement="failed")
        released = published._replace(settlement="released")
        if in_flight(world) < IN_FLIGHT:
            sent = world._replace(messages=world.messages + 1)
            yield Step(f"{who} publishes event {number}", False, _with(sent, index, published))
            if worse := self._setting.fault(sent, "unconfirmed"):
                yield Step(f"{who} publishes event {number} and gets no confirm", True, _with(worse, index, released))
        if worse := self._setting.fault(world, "outage"):
            yield Step(f"{who} cannot publish event {number}", True, _with(worse, index, released))
        if worse := self._setting.fault(world, "rejected"):
            events = tuple(event._replace(failures=event.failures + (event.number == number)) for event in worse.events)
            rejected = _with(worse._replace(events=events), index, failed)
            yield Step(f"the broker rejects event {number} of {who}", True, rejected)

    def _settle(self, world: World, index: int, dispatcher: Dispatcher) -> Steps:
        request = Request("settle", dispatcher.token, event=dispatcher.event, settlement=dispatcher.settlement)
        label = f"{_name(index)} settles event {dispatcher.event}: {dispatcher.settlement}"
        yield Step(label, False, _with(self._outbox.settle(world, request), index, Dispatcher()))
        if worse := self._setting.fault(world, "late"):
            late = worse._replace(late=(*worse.late, request))
            yield Step(f"a settle of {_name(index)} gets no answer", True, late)

    def _late(self, world: World, request: Request) -> Steps:
        rest = world._replace(late=without(world.late, request))
        if request.call == "claim":
            for after, number in self._outbox.claim(rest, request.token):
                yield Step(f"a late claim of event {number} is carried out", True, after)
        elif request.call == "settle":
            label = f"a late settle of event {request.event} is carried out: {request.settlement}"
            yield Step(label, True, self._outbox.settle(rest, request))


def _name(index: int) -> str:
    return f"dispatcher {index + 1}"


def _with(world: World, index: int, dispatcher: Dispatcher) -> World:
    return world._replace(dispatchers=put(world.dispatchers, index, dispatcher))
