"""What executors do, and what becomes of their late requests.

idle ──message──▶ wants ──leased──▶ runs ──▶ reports ──▶ done ──acknowledged──▶ idle
                    │                │                    ▲
                    └──refused───────┴──answered at once──┘
"""

from collections.abc import Iterator

from tests.model.books import row_of
from tests.model.explorer import Step
from tests.model.flaws import Flaw
from tests.model.recovery import next_hello, open_session, suspect
from tests.model.service import Answer, Service
from tests.model.setting import Setting
from tests.model.world import Executor, Report, Request, World, fresh, lease_tokens, name, put, without

Steps = Iterator[Step[World]]


class ExecutorSteps:
    """The executors of one setting."""

    def __init__(self, setting: Setting, service: Service) -> None:
        self._setting = setting
        self._service = service

    def steps(self, world: World) -> Steps:
        """Return what executors can do next."""
        for index, executor in enumerate(world.executors):
            if executor.alive:
                yield from self._work(world, index, executor)
                if not world.ended:
                    yield from self._connect(world, index, executor)
                    yield from self._die(world, index, executor)
            elif executor.connected and not world.ended:
                yield Step(f"the session of dead {name(index)} breaks", False, _broken(world, index))
            for request in set(executor.late):
                yield self._late(world, index, request)
        if not world.ended and sum(executor.alive for executor in world.executors) < self._setting.executors:
            # A process that is started again is another executor.
            yield Step("an executor starts", False, world._replace(executors=(*world.executors, Executor())))

    def _work(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        match executor.stage:
            case "idle" if world.messages:
                taken = world._replace(messages=world.messages - 1)
                keeps = Flaw.ACKNOWLEDGED_BEFORE_LOCK not in self._setting.flaws
                token = fresh(lease_tokens(world))
                received = taken.executor(index, stage="wants", token=token, has_message=keeps)
                yield Step(f"{who} receives a message", False, received)
            case "wants":
                yield from self._lock(world, index, executor)
            case "runs":
                yield from self._run(world, index, executor)
                yield from self._heartbeat(world, index, executor)
            case "reports":
                yield from self._report(world, index, executor, executor.report)
                yield from self._heartbeat(world, index, executor)
            case "done":
                acknowledged = world.executor(index, stage="idle", has_message=False)
                yield Step(f"{who} acknowledges its message", False, acknowledged)

    def _lock(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        request = Request("lock", executor.token, present=executor.present)
        after, answer = self._service.lock(world, index, request)
        yield Step(f"{who} locks: {answer}", False, _locked(after, index, answer))
        yield from self._unanswered(world, index, request)
        if wanted := self._setting.wish(world, "unknown type"):
            after, answer = self._service.lock(wanted, index, request, knows_type=False)
            yield Step(f"{who}, which does not know the type, locks: {answer}", True, _locked(after, index, answer))

    def _run(self, world: World, index: int, executor: Executor) -> Steps:
        yield from self._report(world, index, executor, "succeeded")
        if self._setting.failures:
            yield from self._report(world, index, executor, "failed")
        hand_backs: tuple[Report, ...] = ("handed back", "handed back for later")
        for report in hand_backs:
            if wanted := self._setting.wish(world, report):
                for step in self._report(wanted, index, executor, report):
                    yield step._replace(forced=True)

    def _report(self, world: World, index: int, executor: Executor, report: Report) -> Steps:
        execution = executor.execution if report == "failed" else 0
        request = Request("report", executor.token, executor.attempt, report, execution)
        after, answer = self._service.report(world, index, request)
        label = f"{name(index)} reports {report}: {answer}"
        yield Step(label, False, _answered(after, index, executor, answer))
        # Its repeats say the same.
        repeating = world.executor(index, stage="reports", report=report)
        yield from self._unanswered(repeating, index, request)

    def _heartbeat(self, world: World, index: int, executor: Executor) -> Steps:
        request = Request("heartbeat", executor.token, executor.attempt)
        after, answer = self._service.heartbeat(world, index, request)
        # While a report is under way, only that decides what follows.
        if executor.stage == "runs" and answer == "lease lost":
            after = _done(after, index)
        elif executor.stage == "runs" and answer == "cancel requested":
            after = after.executor(index, stage="reports", report="cancelled")
        yield Step(f"{name(index)} renews its lease: {answer}", False, after)
        yield from self._unanswered(world, index, request)

    def _connect(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        if executor.connected:
            if worse := self._setting.fault(world, "break"):
                yield Step(f"the session of {who} breaks, although it lives", True, _broken(worse, index))
            return
        hello = next_hello(world, index)
        again = open_session(world, index, hello, self._setting.flaws)
        assert again is not None, "a hello was refused, although none that is later was said"
        yield Step(f"{who} says hello again", False, again.executor(index, connected=True, present=True))
        if worse := self._setting.fault(world, "late hello"):
            yield Step(f"a hello of {who} gets no answer", True, worse.executor(index, late=(*executor.late, hello)))

    def _die(self, world: World, index: int, executor: Executor) -> Steps:
        if executor.stage == "idle" and not executor.late:
            # It has nothing in hand: its death changes nothing.
            return
        if worse := self._setting.fault(world, "crash"):
            nothing = Executor()
            dead = executor._replace(
                alive=False,
                stage=nothing.stage,
                token=nothing.token,
                attempt=nothing.attempt,
                execution=nothing.execution,
                report=nothing.report,
                has_message=False,
            )
            # The broker gives its message to somebody else.
            worse = worse._replace(messages=worse.messages + executor.has_message)
            yield Step(f"{name(index)} dies", True, worse._replace(executors=put(worse.executors, index, dead)))

    def _unanswered(self, world: World, index: int, request: Request) -> Steps:
        worse = self._setting.fault(world, "late")
        if worse is None and request.call == "lock":
            worse = self._setting.fault(world, "late lock")
        if worse is not None:
            late = (*world.executors[index].late, request)
            label = f"a {request.call} of {name(index)} gets no answer"
            yield Step(label, True, worse.executor(index, late=late))

    def _late(self, world: World, index: int, request: Request) -> Step[World]:
        """Carry a late request out, which nobody can rely on; nobody hears the answer."""
        executor = world.executors[index]
        world = world.executor(index, late=without(executor.late, request))
        match request.call:
            case "lock":
                after, answer = self._service.lock(world, index, request)
                knows = executor.token == request.token and executor.stage != "done"
                if self._setting.knows_leases and answer == "leased" and executor.alive and not knows:
                    after = after.blame("an executor was given a lease that it does not know of")
                if answer == "leased" and not executor.alive and executor.disconnected and world.row != after.row:
                    after = after.blame("a dead executor was given a lease after its session had broken")
            case "heartbeat":
                after, answer = self._service.heartbeat(world, index, request)
            case "report":
                after, answer = self._service.report(world, index, request)
            case _ if (opened := open_session(world, index, request, self._setting.flaws)) is not None:
                # The executor has given its stream up, and the replica that took the hello finds that out.
                after, answer = suspect(opened, index, present=True), "session open"
            case _:
                after, answer = world, "session lost"
        return Step(f"a late {request.call} of {name(index)} is carried out: {answer}", True, after)


def _locked(world: World, index: int, answer: Answer) -> World:
    if answer == "leased":
        return world.executor(index, stage="runs", attempt=row_of(world).attempt, execution=1)
    if answer == "session lost":
        # It needs a new session before it may ask again (`ExecutorSession.lost`).
        return world.executor(index, connected=False)
    return _done(world, index)


def _answered(world: World, index: int, executor: Executor, answer: Answer) -> World:
    """Go on after a report as the answer says (`services.executor.engine.complete`)."""
    if answer == "go on":
        return world.executor(index, stage="runs", report="", execution=executor.execution + 1)
    if answer == "cancel requested":
        return world.executor(index, stage="reports", report="cancelled")
    return _done(world, index)


def _done(world: World, index: int) -> World:
    stage = "done" if world.executors[index].has_message else "idle"
    return world.executor(index, stage=stage, token="", attempt=0, execution=0, report="")


def _broken(world: World, index: int) -> World:
    return suspect(world, index, present=world.executors[index].present).executor(index, connected=False)
