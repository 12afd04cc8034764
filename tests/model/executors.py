"""What executors do, and what becomes of their late requests.

    idle ──message──▶ wants ──leased──▶ runs ──▶ reports ──▶ done ──acknowledged──▶ idle
                        └──refused─────────────────────────────▲
"""

from collections.abc import Iterator

from tests.model.explorer import Step
from tests.model.flaws import Flaw
from tests.model.rules import EARLIER
from tests.model.service import Answer, Service, begin_epoch
from tests.model.setting import Setting
from tests.model.world import Executor, Late, Report, Suspicion, World, fresh, lease_tokens, name

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
                yield from self._live(world, index, executor)
            elif executor.connected and not world.ended:
                yield Step(f"the session of dead {name(index)} breaks", False, _break(world, index))
            yield from self._late(world, index, executor)
        if not world.ended and sum(executor.alive for executor in world.executors) < self._setting.executors:
            # A process that is started again is another executor.
            yield Step("an executor starts", False, world._replace(executors=(*world.executors, Executor())))

    def _live(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        match executor.stage:
            case "idle" if world.messages:
                taken = world._replace(messages=world.messages - 1)
                token = fresh(lease_tokens(world))
                keeps = Flaw.ACKNOWLEDGED_BEFORE_LOCK not in self._setting.flaws
                after = taken.executor(index, stage="wants", token=token, has_message=keeps)
                yield Step(f"{who} receives a message", False, after)
            case "wants":
                yield from self._lock(world, index, executor)
            case "runs":
                yield from self._run(world, index, executor)
            case "reports":
                yield from self._report(world, index, executor, executor.report)
            case "done":
                after = world.executor(index, stage="idle", has_message=False)
                yield Step(f"{who} acknowledges its message", False, after)
        if executor.stage in ("runs", "reports"):
            yield from self._heartbeat(world, index, executor)
        if world.ended:
            return
        if not executor.connected:
            after = begin_epoch(world, index).executor(index, connected=True, present=True)
            yield Step(f"{who} says hello again", False, after)
            if after := self._setting.fault(world, "late hello"):
                after = after.executor(index, late=(*executor.late, Late("hello")))
                yield Step(f"a hello of {who} gets no answer", True, after)
        elif after := self._setting.fault(world, "break"):
            yield Step(f"the session of {who} breaks, although it lives", True, _break(after, index))
        if after := self._setting.fault(world, "crash"):
            after = after._replace(messages=after.messages + executor.has_message)
            dead = Executor(
                alive=False,
                connected=executor.connected,
                present=executor.present,
                suspected=executor.suspected,
                suspicions=executor.suspicions,
                late=executor.late,
            )
            executors = (*after.executors[:index], dead, *after.executors[index + 1 :])
            yield Step(f"{who} dies", True, after._replace(executors=executors))

    def _lock(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        after, answer = self._service.lock(world, index, executor.token, present=executor.present)
        yield Step(f"{who} locks: {answer}", False, self._locked(after, index, answer))
        if late := self._unanswered(world, index, Late("lock", executor.token, present=executor.present)):
            yield Step(f"a lock of {who} gets no answer", True, late)
        if wanted := self._setting.wish(world, "unknown type"):
            after, answer = self._service.lock(
                wanted, index, executor.token, present=executor.present, knows_type=False
            )
            if answer == "not ours":
                yield Step(f"{who} locks, but does not know the type", True, self._locked(after, index, answer))

    @staticmethod
    def _locked(world: World, index: int, answer: Answer) -> World:
        if answer == "leased":
            assert world.row is not None
            return world.executor(index, stage="runs", attempt=world.row.attempt, execution=1)
        if answer == "session lost":
            # It needs a new session before it may ask again.
            return world.executor(index, connected=False)
        return _done(world, index)

    def _run(self, world: World, index: int, executor: Executor) -> Steps:
        yield from self._report(world, index, executor, "succeeded")
        if self._setting.failures:
            yield from self._report(world, index, executor, "failed")
        for report in ("hand back", "hand back for later"):
            if wanted := self._setting.wish(world, report):
                said: Report = "handed back" if report == "hand back" else "handed back for later"
                for step in self._report(wanted, index, executor, said):
                    yield step._replace(forced=True)

    def _report(self, world: World, index: int, executor: Executor, report: Report) -> Steps:
        who = name(index)
        after, answer = self._service.report(
            world, index, executor.attempt, executor.token, report, executor.execution
        )
        yield Step(f"{who} reports {report}: {answer}", False, self._answered(after, index, executor, report, answer))
        request = Late("report", executor.token, executor.attempt, report, executor.execution)
        if late := self._unanswered(world, index, request):
            after = late.executor(index, stage="reports", report=report)
            yield Step(f"a report of {who} gets no answer: {report}", True, after)

    @staticmethod
    def _answered(world: World, index: int, executor: Executor, report: Report, answer: Answer) -> World:
        """Go on as the answer says (`services.executor.engine`)."""
        if answer == "go on":
            return world.executor(index, stage="runs", report="", execution=executor.execution + 1)
        if answer == "cancel requested":
            return world.executor(index, stage="reports", report="cancelled")
        return _done(world, index)

    def _heartbeat(self, world: World, index: int, executor: Executor) -> Steps:
        """Renew the lease. While a report is under way, only that decides what follows."""
        who = name(index)
        after, answer = self._service.heartbeat(world, index, executor.attempt, executor.token)
        if executor.stage == "runs" and answer == "lease lost":
            after = _done(after, index)
        elif executor.stage == "runs" and answer == "cancel requested":
            after = after.executor(index, stage="reports", report="cancelled")
        yield Step(f"{who} renews its lease: {answer}", False, after)
        if late := self._unanswered(world, index, Late("heartbeat", executor.token, executor.attempt)):
            yield Step(f"a heartbeat of {who} is late", True, late)

    def _unanswered(self, world: World, index: int, request: Late) -> World | None:
        if (after := self._setting.fault(world, "late")) is None:
            return None
        return after.executor(index, late=(*world.executors[index].late, request))

    def _late(self, world: World, index: int, executor: Executor) -> Steps:
        who = name(index)
        for number, late in enumerate(executor.late):
            rest = world.executor(index, late=executor.late[:number] + executor.late[number + 1 :])
            match late.call:
                case "lock":
                    after, answer = self._service.lock(rest, index, late.token, present=late.present)
                    asks = executor.stage == "wants" and executor.token == late.token
                    runs = executor.stage in ("runs", "reports") and executor.token == late.token
                    if answer == "leased" and executor.alive and not (asks or runs):
                        after = after.blame("a lease was given to an executor that does not know of it")
                case "heartbeat":
                    after, answer = self._service.heartbeat(rest, index, late.attempt, late.token)
                case "report":
                    after, answer = self._service.report(
                        rest, index, late.attempt, late.token, late.report, late.execution
                    )
                case _:
                    # Its stream is gone; the replica that took the hello will find that out.
                    after, answer = _late_hello(rest, index), "refused"
            yield Step(f"a late {late.call} of {who} is carried out: {answer}", False, after)


def _done(world: World, index: int) -> World:
    has_message = world.executors[index].has_message
    stage = "done" if has_message else "idle"
    return world.executor(index, stage=stage, token="", attempt=0, execution=0, report="")


def _break(world: World, index: int) -> World:
    executor = world.executors[index]
    suspicions = tuple(sorted((*executor.suspicions, Suspicion(present=executor.present))))
    return world.executor(index, connected=False, suspicions=suspicions)


def _late_hello(world: World, index: int) -> World:
    after = begin_epoch(world, index)
    suspicions = tuple(sorted((*after.executors[index].suspicions, Suspicion())))
    return after.executor(index, suspicions=suspicions)
