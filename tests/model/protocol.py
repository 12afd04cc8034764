"""Everything that can happen next: by client, executors, dispatchers, the loops of the jobs service, broker and time."""

from collections.abc import Iterator


from services.jobs.store.outbox import EventStatus
from tests.model import rules
from tests.model.executors import ExecutorSteps
from tests.model.explorer import Step
from tests.model.flaws import Flaw
from tests.model.normal import normal
from tests.model.outbox import Outbox
from tests.model.properties import problem, settled
from tests.model.rules import EARLIER, LATER
from tests.model.service import Service
from tests.model.setting import IN_FLIGHT, Setting, in_flight
from tests.model.world import Canceller, Dispatcher, Executor, Late, World, claim_tokens, fresh, name, put

Steps = Iterator[Step[World]]


class LeaseProtocol:
    """The protocol, in one setting."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._service = Service(setting.flaws, remembers_tokens=setting.remembers_tokens)
        self._outbox = Outbox(setting.flaws)
        self._executors = ExecutorSteps(setting, self._service)

    def start(self) -> World:
        """Return the world before the job is created: everybody is there and has nothing to do."""
        setting = self._setting
        return World(
            executors=(Executor(),) * setting.executors,
            dispatchers=(Dispatcher(),) * setting.dispatchers,
            cancellers=(Canceller(),) * setting.cancellers,
            faults=setting.faults,
            wishes=setting.wishes,
        )

    def normal(self, world: World) -> World:
        """Return the world that stands for all that are like it."""
        return normal(world)

    def wrong(self, world: World) -> str:
        """Say what is wrong with a world."""
        return problem(world)

    def done(self, world: World) -> bool:
        """Tell whether nothing need happen any more."""
        return settled(world)

    def steps(self, world: World) -> Steps:
        """Return everything that can happen next."""
        yield from self._create(world)
        if world.row is None:
            return
        yield from self._cancel(world)
        yield from self._executors.steps(world)
        if world.ended:
            return
        yield from self._sessions(world)
        yield from self._time(world)
        yield from self._loops(world)
        yield from self._dispatch(world)
        yield from self._late_dispatch(world)
        yield from self._broker(world)
        yield from self._operator(world)

    def _create(self, world: World) -> Steps:
        if not world.created:
            yield Step("the client creates the job", False, self._service.create(world)._replace(created=True))
            if after := self._setting.fault(world, "late"):
                yield Step("the create gets no answer", True, after._replace(late=(*after.late, Late("create"))))
        for index, late in enumerate(world.late):
            if late.call == "create":
                rest = world._replace(late=put_out(world.late, index))
                yield Step("the late create is carried out", False, self._service.create(rest))

    def _cancel(self, world: World) -> Steps:
        for index, canceller in enumerate(world.cancellers):
            if canceller.stage != "answered":
                after, answer = self._service.cancel(world, index)
                answered = after.cancellers[index]._replace(stage="answered")
                after = after._replace(cancellers=put(after.cancellers, index, answered))
                yield Step(f"a cancel is answered: {answer}", canceller.stage == "may", after)
            if canceller.stage == "may" and (after := self._setting.fault(world, "late")):
                asking = canceller._replace(stage="asks", late=True)
                yield Step("a cancel gets no answer", True, after._replace(cancellers=put(after.cancellers, index, asking)))
            if canceller.late:
                rest = world._replace(cancellers=put(world.cancellers, index, canceller._replace(late=False)))
                after, answer = self._service.cancel(rest, index)
                yield Step(f"the late cancel is carried out: {answer}", False, after)

    def _sessions(self, world: World) -> Steps:
        for index, executor in enumerate(world.executors):
            for suspicion in set(executor.suspicions):
                if suspicion.noted:
                    after = self._service.judge(world, index, suspicion)
                    lost = "its leases end" if after.row != world.row else "nothing ends"
                    yield Step(f"the grace of {name(index)} is over: {lost}", False, after)
                else:
                    after = self._service.note_break(world, index, suspicion)
                    yield Step(f"the broken session of {name(index)} is noted", False, after)
                if after := self._setting.fault(world, "replica"):
                    others = list(executor.suspicions)
                    others.remove(suspicion)
                    after = after.executor(index, suspicions=tuple(others))
                    yield Step(f"the replica that suspects {name(index)} dies", True, after)

    def _time(self, world: World) -> Steps:
        """Let a lease, a delay or a claim end: by itself if nobody is there to keep it, else by a fault."""
        row = world.row
        assert row is not None
        if row.lock_until == LATER:
            kept = any(
                executor.alive and executor.token == row.lease_token and executor.stage in ("wants", "runs", "reports")
                for executor in world.executors
            )
            if after := self._setting.fault(world, "slow") if kept else world:
                ended = after._replace(row=row._replace(lock_until=EARLIER))
                yield Step("the lease ends" + (", although its holder lives" if kept else ""), kept, ended)
        if row.due_at == LATER:
            events = tuple(event._replace(delayed=False) for event in world.events)
            yield Step("the job is due", False, world._replace(row=row._replace(due_at=None), events=events))
        for index, event in enumerate(world.events):
            if event.status == EventStatus.PROCESSING:
                kept = any(dispatcher.token == event.token for dispatcher in world.dispatchers)
                if after := self._setting.fault(world, "slow") if kept else world:
                    label = f"the claim of event {event.number} ends" + (", although its dispatcher lives" if kept else "")
                    yield Step(label, kept, self._outbox.release(after, index))

    def _loops(self, world: World) -> Steps:
        """The reaper and the sweep, which first read and then write."""
        row = world.row
        assert row is not None
        if self._setting.reaper and not world.to_lapse:
            yield Step("the reaper reads", False, self._service.find_expired(world))
        if world.to_lapse:
            yield Step("the reaper writes", False, self._service.lapse_found(world))
        if world.to_dispatch:
            yield Step("the sweep writes", False, self._service.dispatch_found(world))
        elif self._setting.sweep and self._seems_lost(world):
            found = world._replace(to_dispatch=row.dispatch_no)
            yield Step("the sweep reads", False, found)

    def _seems_lost(self, world: World) -> bool:
        """Tell whether the sweep takes the job's message for lost (`Reconciliation._idle_queues`, `_is_lost`).

        It may do so too early only for a message that an executor has received and not looked at yet: one in the
        broker would have been given to the executor that is idle.
        """
        row = world.row
        assert row is not None
        idle = any(executor.alive and executor.stage == "idle" and executor.connected for executor in world.executors)
        sent = any(
            event.number == row.dispatch_no and event.status == EventStatus.PUBLISHED for event in world.events
        )
        asking = any(executor.alive and executor.stage == "wants" for executor in world.executors)
        due = row.due_at != LATER and not world.paused
        return rules.job(row).waits and due and idle and sent and not world.messages and not asking

    def _dispatch(self, world: World) -> Steps:
        """What dispatchers do (`services.dispatcher.relay`)."""
        for index, dispatcher in enumerate(world.dispatchers):
            who = f"dispatcher {index + 1}"
            match dispatcher.stage:
                case "idle" | "claims":
                    token = dispatcher.token or fresh(claim_tokens(world))
                    for after, number in self._outbox.claim(world, token):
                        yield Step(
                            f"{who} claims event {number}",
                            False,
                            self._dispatcher(after, index, Dispatcher("holds", token, number)),
                        )
                    if dispatcher.stage == "idle" and (after := self._setting.fault(world, "late")):
                        after = after._replace(late=(*after.late, Late("claim", token)))
                        claiming = self._dispatcher(after, index, Dispatcher("claims", token))
                        yield Step(f"a claim of {who} gets no answer", True, claiming)
                case "holds":
                    yield from self._publish(world, index, who, dispatcher)
                case "settles":
                    settlement = dispatcher.settlement
                    after = self._outbox.settle(world, dispatcher.token, dispatcher.event, settlement)
                    idle = self._dispatcher(after, index, Dispatcher())
                    yield Step(f"{who} settles event {dispatcher.event}: {settlement}", False, idle)
                    if after := self._setting.fault(world, "late"):
                        late = Late("settle", dispatcher.token, event=dispatcher.event, settlement=settlement)
                        after = after._replace(late=(*after.late, late))
                        yield Step(f"a settle of {who} gets no answer", True, after)
            if dispatcher.stage != "idle" and (after := self._setting.fault(world, "dispatcher")):
                restarted = self._dispatcher(after, index, Dispatcher())
                yield Step(f"{who} is killed and started again", True, restarted)

    def _publish(self, world: World, index: int, who: str, dispatcher: Dispatcher) -> Steps:
        settle = dispatcher._replace(stage="settles")
        if in_flight(world) < IN_FLIGHT:
            sent = world._replace(messages=world.messages + 1)
            published = self._dispatcher(sent, index, settle._replace(settlement="published"))
            yield Step(f"{who} publishes event {dispatcher.event}", False, published)
            if after := self._setting.fault(sent, "unconfirmed"):
                released = self._dispatcher(after, index, settle._replace(settlement="released"))
                yield Step(f"{who} publishes event {dispatcher.event}, and gets no confirm", True, released)
        if after := self._setting.fault(world, "outage"):
            released = self._dispatcher(after, index, settle._replace(settlement="released"))
            yield Step(f"{who} cannot publish event {dispatcher.event}", True, released)
        if after := self._setting.fault(world, "rejected"):
            events = tuple(
                event._replace(failures=event.failures + 1) if event.number == dispatcher.event else event
                for event in after.events
            )
            failed = self._dispatcher(after._replace(events=events), index, settle._replace(settlement="failed"))
            yield Step(f"the broker rejects event {dispatcher.event} of {who}", True, failed)

    def _late_dispatch(self, world: World) -> Steps:
        for index, late in enumerate(world.late):
            rest = world._replace(late=put_out(world.late, index))
            if late.call == "claim":
                for after, number in self._outbox.claim(rest, late.token):
                    yield Step(f"a late claim of event {number} is carried out", False, after)
            elif late.call == "settle":
                after = self._outbox.settle(rest, late.token, late.event, late.settlement)
                yield Step(f"a late settle of event {late.event} is carried out: {late.settlement}", False, after)

    def _broker(self, world: World) -> Steps:
        if world.messages and (after := self._setting.fault(world, "lost")):
            yield Step("the broker loses a message", True, after._replace(messages=world.messages - 1))
        if world.messages and in_flight(world) < IN_FLIGHT and (after := self._setting.fault(world, "doubled")):
            yield Step("the broker doubles a message", True, after._replace(messages=world.messages + 1))
        for index, executor in enumerate(world.executors):
            if executor.has_message and (after := self._setting.fault(world, "cut")):
                cut = after._replace(messages=world.messages + 1).executor(index, has_message=False)
                yield Step(f"the broker takes the message of {name(index)} back", True, cut)

    def _operator(self, world: World) -> Steps:
        if world.paused:
            yield Step("the queue is resumed", False, world._replace(paused=False))
        elif after := self._setting.wish(world, "pause"):
            yield Step("the queue is paused", True, after._replace(paused=True))

    @staticmethod
    def _dispatcher(world: World, index: int, dispatcher: Dispatcher) -> World:
        return world._replace(dispatchers=put(world.dispatchers, index, dispatcher))


def put_out(late: tuple[Late, ...], index: int) -> tuple[Late, ...]:
    """Take one late request away."""
    return late[:index] + late[index + 1 :]
