"""The machine: at every step one of several actors does something, in any order, also too late or once more."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.jobs.leasing import LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.outbox import Published
from services.jobs.retrying import RETRYABLE
from tests.conformance.conftest import new_job, success
from tests.conformance.machine.backends import Backends
from tests.conformance.machine.draws import (
    DELAY,
    DISPATCH,
    EXECUTOR,
    FIT,
    IDLE,
    LIMIT,
    MEANWHILE,
    NEW_JOB,
    PICK,
    REPORT,
    REQUEST_ID,
    RESULTS,
    SPAN,
    report_of,
    result_of,
    some,
)
from tests.conformance.machine.holders import Holders
from tests.conformance.machine.stage import Again, Meanwhile, Stage
from tests.conformance.machine.upkeep import Upkeep
from tests.conformance.machine.world import due, ended


class JobMachine(RuleBasedStateMachine):
    """Draws what is done; the actors do it and know what has to come of it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        stage.begin()
        self.stage = stage
        self.backends = Backends(stage)
        self.holders = Holders(stage)
        self.upkeep = Upkeep(stage, self.holders)
        self._names = 0

    @initialize(delay=st.sampled_from([None, None, 30]))
    def begin(self, delay: int | None) -> None:
        """Begin with an executor and a job, so that no step is lost on nothing to do."""
        self.stage.run(self.holders.hello("executor-1"))
        self.create({"idempotency_key": "key-1"}, "", delay)

    @rule(wanted=NEW_JOB, request_id=REQUEST_ID, delay=DELAY)
    def create(self, wanted: dict[str, Any], request_id: str, delay: int | None) -> None:
        run_at = None if delay is None else self.stage.clock.now + timedelta(seconds=delay)
        request = new_job(**wanted, request_id=request_id or self._name("request"), run_at=run_at)
        self.stage.run(self.backends.create(request))

    @rule(run=st.booleans())
    def create_plainly(self, run: bool) -> None:
        """Create one more job of the busiest user, and perhaps have an executor lock it."""
        self.create({}, "", None)
        if run and self._ready:
            self.lock_waiting("executor-1", 0, True)

    @precondition(lambda self: self.stage.world.jobs)
    @rule(pick=PICK, fit=FIT, request_id=REQUEST_ID, then=REPORT)
    def cancel(self, pick: int, fit: bool, request_id: str, then: str) -> None:
        """Cancel a job; if it is one that runs, its holder reports before it has heard of it."""
        lease = self._lease(pick, True) if fit else None
        job_id = lease.job_id if lease else some(list(self.stage.world.jobs), pick)
        self.stage.run(self.backends.cancel(job_id, request_id or self._name("request")))
        if lease:
            self._report(lease, then)

    @precondition(lambda self: any(ended(job) for job in self.stage.world.jobs.values()))
    @rule(pick=PICK, fit=FIT, request_id=REQUEST_ID)
    def retry(self, pick: int, fit: bool, request_id: str) -> None:
        jobs = self.stage.world.jobs
        over = [job_id for job_id, job in jobs.items() if fit and job["lifecycle_status"] in RETRYABLE]
        self.stage.run(self.backends.retry(some(over or list(jobs), pick), request_id or self._name("request")))

    @rule(
        executor_id=EXECUTOR,
        age=st.sampled_from([0, 0, 0, 1]),
        waited=st.sampled_from([1, 1, 1, 5]),
        act=MEANWHILE,
    )
    def session(self, executor_id: str, age: int, waited: int, act: tuple[str, int]) -> None:
        """Break a session that an executor has or had; one that has none begins one."""
        if not self._open(executor_id):
            return
        self._lease(act[1], True)
        session = some(self.holders.sessions[executor_id], age)
        self.stage.run(self.holders.lose(session, timedelta(seconds=waited), self._meanwhile(act)))

    @precondition(lambda self: self.stage.world.waiting)
    @rule(executor_id=EXECUTOR, pick=PICK, fit=FIT)
    def lock_waiting(self, executor_id: str, pick: int, fit: bool) -> None:
        self._open(executor_id)
        jobs = (fit and self._ready) or self.stage.world.waiting
        self._lock(executor_id, 0, [some(jobs, pick)], [self._name("token")])

    @precondition(lambda self: self.stage.world.jobs)
    @rule(
        executor_id=EXECUTOR,
        age=st.sampled_from([0, 0, 1]),
        picks=st.lists(PICK, min_size=1, max_size=3),
        one=st.booleans(),
    )
    def lock_any(self, executor_id: str, age: int, picks: list[int], one: bool) -> None:
        names = [self._name("token") for _ in picks]
        self._lock(executor_id, age, [self._job(pick) for pick in picks], names[:1] * len(names) if one else names)

    @rule(pick=PICK, fit=FIT, progress=st.sampled_from([None, 10, 90]))
    def heartbeat(self, pick: int, fit: bool, progress: int | None) -> None:
        if lease := self._lease(pick, fit):
            self.stage.run(self.holders.heartbeat(lease, progress))

    @rule(pick=PICK, words=st.lists(REPORT, min_size=1, max_size=2))
    def submit_by_holder(self, pick: int, words: list[str]) -> None:
        """Report as a holder; the second report comes under the same lease, whatever the first one did to it."""
        if lease := self._lease(pick, True):
            for word in words:
                self._report(lease, word)

    @rule(pick=PICK, word=REPORT)
    def submit_by_anybody(self, pick: int, word: str) -> None:
        """Report as somebody who had a lease once, or believed to."""
        if lease := self._lease(pick, False):
            self._report(lease, word)

    @precondition(lambda self: self._sent)
    @rule(pick=st.integers(0, 30))
    def repeat(self, pick: int) -> None:
        """Send a call once more, exactly as it was sent before."""
        self.stage.run(some(self._sent, pick)())

    @rule(pick=PICK, how=DISPATCH, limit=LIMIT, words=RESULTS)
    def dispatch(self, pick: int, how: str, limit: int, words: list[str]) -> None:
        """Claim events and leave them; or publish them all; or settle what was claimed earlier, or was until then."""
        if pick % 4:
            self.stage.run(self.upkeep.promote())
        if how == "late":
            self.stage.run(self.upkeep.claim(self._name("claim"), limit))
            self.stage.clock.advance(timedelta(seconds=61))
            self.stage.run(self.upkeep.release_claims())
            self.stage.run(self.upkeep.claim(self._name("claim"), limit))
        if how in ("settle", "late") and self.upkeep.claims:
            token, events = some(self.upkeep.claims, pick)
            results = [(event_id, result_of(word)) for event_id, word in zip(events, words, strict=False)]
            self.stage.run(self.upkeep.settle(token, results))
        elif how == "publish":
            self._publish(limit)
        else:
            self.stage.run(self.upkeep.claim(self._name("claim"), limit))

    @rule(late=st.sampled_from([0, 95, 95]), act=MEANWHILE)
    def reap(self, late: int, act: tuple[str, int]) -> None:
        if late:
            self._lease(act[1], True)
        self.stage.clock.advance(timedelta(seconds=late))
        self.stage.run(self.upkeep.reap(self._meanwhile(act)))

    @rule(executor_id=EXECUTOR, late=st.sampled_from([0, 11, 11]), idle=IDLE, act=MEANWHILE)
    def sweep(self, executor_id: str, late: int, idle: bool, act: tuple[str, int]) -> None:
        """Sweep; if late, after the messages of all jobs were lost."""
        if late:
            self.stage.run(self.upkeep.promote())
            self._publish(100)
        self.stage.clock.advance(timedelta(seconds=late))
        self.stage.run(self.upkeep.sweep(executor_id if idle else None, self._meanwhile(act)))

    @rule(span=SPAN, act=st.sampled_from(["", "pause", "pause", "resume", "resume", "release"]))
    def wait(self, span: int, act: str) -> None:
        """Let time pass, and then perhaps do what operators and loops do without anybody's call."""
        self.stage.clock.advance(timedelta(seconds=span))
        if act == "release":
            self.stage.run(self.upkeep.release_claims())
        elif act:
            self.stage.run(self.upkeep.pause(paused=act == "pause"))

    def teardown(self) -> None:
        if self.stage.sound and any(not ended(job) for job in self.stage.world.jobs.values()):
            self.stage.run(self.upkeep.finish())

    @property
    def _sent(self) -> Sequence[Again]:
        return [*self.upkeep.sent, *self.holders.sent, *self.backends.sent]

    @property
    def _ready(self) -> Sequence[str]:
        """The jobs that can be locked now."""
        jobs, now = self.stage.world.jobs, self.stage.clock.now
        return [id_ for id_ in self.stage.world.waiting if not self.stage.world.paused and due(jobs[id_], now)]

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def _job(self, pick: int) -> str:
        return some(list(self.stage.world.jobs), pick)

    def _lease(self, pick: int, fit: bool) -> Lease | None:
        """Choose a lease, or (fit) one that is held; when there is none an executor locks something first."""
        if not self.holders.present and (fit or not self.holders.leases) and self._ready:
            self.lock_waiting("executor-1", pick, True)
        leases = (fit and self.holders.present) or self.holders.leases
        return some(leases, pick) if leases else None

    def _report(self, lease: Lease, word: str) -> None:
        self.stage.run(self.holders.submit(lease, report_of(lease, word, self.holders.next_execution(lease))))

    def _publish(self, limit: int) -> None:
        token = self._name("claim")
        if events := self.stage.run(self.upkeep.claim(token, limit)):
            self.stage.run(self.upkeep.settle(token, [(event_id, Published()) for event_id in events]))

    def _open(self, executor_id: str) -> bool:
        """Have an executor say hello if it has no session; False if it had none."""
        row = self.stage.world.executors.get(executor_id)
        if row is not None and row["lost_at"] is None:
            return True
        self.stage.run(self.holders.hello(executor_id))
        return False

    def _lock(self, executor_id: str, age: int, job_ids: Sequence[str], tokens: Sequence[str]) -> None:
        if executor_id not in self.holders.sessions:
            self._open(executor_id)
        wishes = [LockRequest(job_id=id_, lease_token=token) for id_, token in zip(job_ids, tokens, strict=True)]
        self.stage.run(self.holders.lock(some(self.holders.sessions[executor_id], age), wishes))

    def _meanwhile(self, act: tuple[str, int]) -> Meanwhile | None:
        """Return what another actor does between two transactions of this step."""
        word, pick = act
        leases, jobs, waiting = self.holders.present, list(self.stage.world.jobs), self.stage.world.waiting
        doing: Meanwhile | None = None
        match word:
            case "heartbeat" if leases:
                doing = partial(self.holders.heartbeat, some(leases, pick), None)
            case "success" if leases:
                doing = partial(self.holders.submit, some(leases, pick), success())
            case "cancel" if jobs:
                doing = partial(self.backends.cancel, some(jobs, pick), f"meanwhile-{pick}")
            case "lock" if waiting:
                wish = LockRequest(job_id=some(waiting, pick), lease_token=self._name("token"))
                doing = partial(self.holders.lock, self.holders.sessions["executor-1"][-1], [wish])
            case "reap":
                doing = partial(self.upkeep.reap, None)
            case "sweep":
                doing = partial(self.upkeep.sweep, None, None)
            case "hello":
                doing = partial(self.holders.hello, "executor-1")
        return doing
