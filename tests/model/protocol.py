"""The whole protocol: what can happen next, by whomever."""

from collections.abc import Iterator

from services.jobs.store.outbox import EventStatus
from tests.model import recovery
from tests.model.books import row_of
from tests.model.dispatchers import DispatcherSteps
from tests.model.executors import ExecutorSteps
from tests.model.explorer import Step
from tests.model.normal import normal
from tests.model.outbox import Outbox
from tests.model.properties import problem, settled
from tests.model.rules import EARLIER, LATER
from tests.model.service import Service
from tests.model.setting import IN_FLIGHT, Setting, in_flight
from tests.model.world import Canceller, Dispatcher, Executor, Request, World, name, put, without

Steps = Iterator[Step[World]]


class LeaseProtocol:
    """The protocol in one setting, as the explorer wants it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._service = Service(setting.flaws)
        self._outbox = Outbox(setting.flaws)
        self._executors = ExecutorSteps(setting, self._service)
        self._dispatchers = DispatcherSteps(setting, self._outbox)

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
            # Nothing else could change an ended job: what is left of it is refused.
            return
        yield from self._dispatchers.steps(world)
        yield from self._sessions(world)
        yield from self._loops(world)
        yield from self._time(world)
        yield from self._broker(world)
        yield from self._operator(world)

    def _create(self, world: World) -> Steps:
        if not world.created:
            yield Step("the client creates the job", False, self._service.create(world)._replace(created=True))
            if worse := self._setting.fault(world, "late"):
                late = worse._replace(late=(*worse.late, Request("create")))
                yield Step("a create gets no answer", True, late)
        if Request("create") in world.late:
            rest = world._replace(late=without(world.late, Request("create")))
            yield Step("a late create is carried out", True, self._service.create(rest))

    def _cancel(self, world: World) -> Steps:
        for index, canceller in enumerate(world.cancellers):
            if canceller.stage != "answered":
                after, answer = self._service.cancel(world, index)
                answered = after.cancellers[index]._replace(stage="answered")
                after = after._replace(cancellers=put(after.cancellers, index, answered))
                yield Step(f"a cancel is answered: {answer or 'too late'}", canceller.stage == "may", after)
            if canceller.stage == "may" and (worse := self._setting.fault(world, "late")):
                asking = put(worse.cancellers, index, canceller._replace(stage="asks", late=True))
                yield Step("a cancel gets no answer", True, worse._replace(cancellers=asking))
            if canceller.late:
                rest = put(world.cancellers, index, canceller._replace(late=False))
                after, answer = self._service.cancel(world._replace(cancellers=rest), index)
                yield Step(f"a late cancel is carried out: {answer or 'too late'}", True, after)

    def _sessions(self, world: World) -> Steps:
        for index, executor in enumerate(world.executors):
            for suspicion in set(executor.suspicions):
                if suspicion.noted:
                    after = recovery.judge(world, index, suspicion, self._setting.flaws)
                    what = "nothing ends" if after.row == world.row else "its lease ends"
                    yield Step(f"the grace of {name(index)} is over: {what}", False, after)
                else:
                    after = recovery.note_break(world, index, suspicion)
                    yield Step(f"the break of {name(index)}'s session is noted", False, after)
                if worse := self._setting.fault(world, "replica"):
                    forgotten = worse.executor(index, suspicions=without(executor.suspicions, suspicion))
                    yield Step(f"the replica that suspects {name(index)} dies", True, forgotten)

    def _loops(self, world: World) -> Steps:
        """The reaper and the sweep."""
        if world.to_lapse:
            yield Step("the reaper writes", False, recovery.lapse_found(world, self._setting.flaws))
        elif recovery.expired(world) and (self._setting.reaper or recovery.holder_lives(world)):
            yield Step("the reaper reads", False, world._replace(to_lapse=True))
        if world.to_dispatch:
            yield Step("the sweep writes", False, recovery.dispatch_found(world))
        elif self._setting.sweep and recovery.seems_lost(world):
            yield Step("the sweep reads", False, world._replace(to_dispatch=row_of(world).dispatch_no))

    def _time(self, world: World) -> Steps:
        """A lease, a delay or a claim ends: of itself if nobody is there to keep it, else by a fault."""
        row = row_of(world)
        if row.lock_until == LATER:
            kept = any(
                executor.alive and executor.token == row.lease_token and executor.stage != "done"
                for executor in world.executors
            )
            if left := self._setting.fault(world, "slow") if kept else world:
                label = "the lease ends" + (", although its holder lives" if kept else "")
                yield Step(label, kept, left._replace(row=row._replace(lock_until=EARLIER)))
        if row.due_at == LATER:
            events = tuple(event._replace(delayed=False) for event in world.events)
            yield Step("the job is due", False, world._replace(row=row._replace(due_at=None), events=events))
        for index, event in enumerate(world.events):
            if event.status != EventStatus.PROCESSING:
                continue
            kept = any(dispatcher.token == event.token for dispatcher in world.dispatchers)
            if left := self._setting.fault(world, "slow") if kept else world:
                label = f"the claim of event {event.number} ends" + (", although its dispatcher lives" if kept else "")
                yield Step(label, kept, self._outbox.release(left, index))

    def _broker(self, world: World) -> Steps:
        if world.messages and (worse := self._setting.fault(world, "lost")):
            yield Step("the broker loses a message", True, worse._replace(messages=world.messages - 1))
        if world.messages and in_flight(world) < IN_FLIGHT and (worse := self._setting.fault(world, "doubled")):
            yield Step("the broker doubles a message", True, worse._replace(messages=world.messages + 1))
        for index, executor in enumerate(world.executors):
            if executor.has_message and (worse := self._setting.fault(world, "cut")):
                cut = worse._replace(messages=world.messages + 1).executor(index, has_message=False)
                yield Step(f"the broker takes the message of {name(index)} back", True, cut)

    def _operator(self, world: World) -> Steps:
        if world.paused:
            yield Step("the queue is resumed", False, world._replace(paused=False))
        elif wanted := self._setting.wish(world, "pause"):
            yield Step("the queue is paused", True, wanted._replace(paused=True))
