"""Executors: they hold sessions, lock, renew and report; some under leases and sessions that are over."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from aijobs.errors import (
    AijobsError,
    CancelRequested,
    IllegalTransition,
    JobNotReady,
    LeaseConflict,
    LeaseLost,
    SessionLost,
)
from aijobs.states import JobState
from services.jobs.execution import Accepted, Cancelled, Failed, Outcome, Released
from services.jobs.leasing import Extend, Extended, Holder, Locked, LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.results import Succeeded
from services.jobs.sessions import Session, Verdict
from tests.conformance.conftest import hello, lease_of
from tests.conformance.machine.stage import LEASE, SESSION_GRACE, Again, Meanwhile, Stage, Step
from tests.conformance.machine.world import MOST_TAKEOVERS, Row, due, ended, leased, waits

Report = Succeeded | Failed | Cancelled | Released

#: The executors and what they know.
KNOWN = {"executor-1": ("testing", "fixed"), "executor-2": ("testing", "fixed"), "executor-3": ("fixed",)}
RETRYABLE = "PROVIDER_TIMEOUT"
FINAL = "CREDENTIAL_MISSING"


class Holders:
    """All executors, with every session and every lease that they ever had."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.sessions: dict[str, list[Session]] = {}
        #: Every lease that was handed out, and those that executors wrongly believed to have.
        self.leases: list[Lease] = []
        self._holder: dict[Lease, str] = {}
        #: The reports that were taken, with the answer: by lease, kind and number of the execution.
        self._taken: dict[tuple[Lease, type[Report], int], tuple[Report, Accepted]] = {}
        self._executions: dict[str, int] = {}
        #: When an executor's last call succeeded.
        self._heard = dict.fromkeys(KNOWN, stage.clock.now)
        self.sent: list[Again] = []

    @property
    def present(self) -> Sequence[Lease]:
        """The leases that are held now."""
        return [lease for lease in self.leases if self._stage.world.held_by(lease)]

    def heard(self, executor_id: str) -> None:
        """Note that a call of an executor succeeded just now."""
        self._heard[executor_id] = self._stage.clock.now

    async def hello(self, executor_id: str) -> None:
        """Begin a session; it ends the earlier one."""
        knows = KNOWN.get(executor_id, KNOWN["executor-1"])
        step = await self._stage.step(
            f"hello({executor_id})", lambda: self._stage.services.sessions.open(hello(executor_id, *knows))
        )
        earlier = self.sessions.setdefault(executor_id, [])
        assert step.quiet
        assert all(session.epoch < step.answer.epoch for session in earlier)
        earlier.append(step.answer)
        self.heard(executor_id)

    async def lose(self, session: Session, waited: timedelta, meanwhile: Meanwhile | None) -> None:
        """Break a session, wait, and judge: leases end only if nothing was heard of the executor, and in time."""
        sessions, clock = self._stage.services.sessions, self._stage.clock
        row = self._stage.world.executors[session.executor_id]
        broke = await self._stage.step(f"break({session})", lambda: sessions._disconnect(session))
        assert broke.answer == (row["session_epoch"] == session.epoch and row["lost_at"] is None)
        assert broke.quiet
        if not broke.answer:
            return
        since = clock.now
        clock.advance(max(waited, SESSION_GRACE))
        if meanwhile is not None:
            await meanwhile()
        judged = await self._stage.step(f"judge({session})", lambda: sessions._judge(session))
        there = self._heard[session.executor_id] > since
        late = clock.now - since > 2 * SESSION_GRACE
        assert judged.answer == (Verdict.THERE if there else Verdict.TOO_LATE if late else Verdict.LOST)
        held = {id_: job for id_, job in judged.before.jobs.items() if job["locked_by"] == session.executor_id}
        assert judged.news == (lapses(held) if judged.answer is Verdict.LOST else {})

    async def lock(self, session: Session, wishes: Sequence[LockRequest]) -> None:
        """Ask for leases: of jobs that wait, are due, not paused and known to the executor, each once."""
        holder = Holder(executor_id=session.executor_id, session_epoch=session.epoch)
        step = await self._stage.step(
            f"lock({session.executor_id}, {[(wish.job_id[-6:], wish.lease_token) for wish in wishes]})",
            lambda: self._stage.services.leasing.lock(holder, wishes),
        )
        row = step.before.executors[session.executor_id]
        if session.epoch != row["session_epoch"] or row["disconnected_at"] is not None:
            assert all(isinstance(answer, SessionLost) for answer in step.answer)
            assert step.quiet
            return
        granted: dict[str, str] = {}
        news: dict[str, list[str]] = {}
        for wish, answer in zip(wishes, step.answer, strict=True):
            job = step.before.jobs[wish.job_id]
            holds = granted.get(wish.job_id, job["lease_token"])
            leases = step.before.tokens(wish.job_id, "locked", "taken_over")
            if wish.lease_token in step.before.tokens(wish.job_id, "dispatched_again"):
                assert isinstance(answer, JobNotReady), "a repeat is refused as the first one was, with no effect"
            elif wish.lease_token in leases and wish.lease_token != job["lease_token"]:
                assert isinstance(answer, LeaseConflict), "a token has one lease"
            elif waits(job) and not self._ready(step, job, session):
                assert isinstance(answer, JobNotReady)
                # The first wish for a job in a batch is the one that is remembered.
                news[wish.job_id] = ["dispatched_again"]
            elif ended(job):
                assert isinstance(answer, IllegalTransition)
            elif holds is not None and holds != wish.lease_token:
                assert isinstance(answer, LeaseConflict)
                # It may believe all the same that it won.
                self._note_lease(
                    Lease(job_id=wish.job_id, attempt=job["attempt"], lease_token=wish.lease_token), session
                )
            else:
                assert isinstance(answer, Locked)
                self._note_lease(lease_of(answer), session)
                assert step.after.held_by(lease_of(answer))
                assert step.after.jobs[wish.job_id]["lock_until"] == self._stage.clock.now + LEASE or not waits(job)
                if waits(job):
                    granted[wish.job_id] = wish.lease_token
                    news[wish.job_id] = ["locked" if job["lifecycle_status"] == JobState.QUEUED else "taken_over"]
        assert step.news == news
        assert news or step.quiet
        self.sent.append(lambda: self.lock(session, wishes))

    async def heartbeat(self, lease: Lease, progress: int | None) -> None:
        """Renew a lease; one that is over stays so."""
        executor_id = self._holder[lease]
        job = self._stage.world.jobs[lease.job_id]
        held = self._stage.world.held_by(lease)
        step = await self._stage.step(
            f"heartbeat({_short(lease)}, {progress})",
            lambda: self._stage.services.leasing.extend(executor_id, [Extend(lease=lease, progress=progress)]),
            beating=lease.job_id if held else None,
        )
        self.heard(executor_id)
        (answer,) = step.answer
        if not held:
            assert step.refused(LeaseLost)
            return
        assert isinstance(answer, Extended)
        assert answer.cancel_requested == (job["cancel_requested_at"] is not None)
        after = step.after.jobs[lease.job_id]
        assert after["lock_until"] == self._stage.clock.now + LEASE
        assert after["progress"] == (job["progress"] if progress is None else progress)

    def next_execution(self, lease: Lease) -> int:
        """Return the number of the run's next execution."""
        return self._executions.get(lease.lease_token, 0) + 1

    async def submit(self, lease: Lease, report: Report) -> None:
        """Report about a run. A report that was taken is answered as then; from a lease that is over none is taken."""
        executor_id = self._holder[lease]
        step = await self._stage.step(
            f"submit({_short(lease)}, {type(report).__name__})",
            lambda: self._stage.services.execution.submit(executor_id, [Outcome(lease=lease, report=report)]),
        )
        self.heard(executor_id)
        (answer,) = step.answer
        job, held = step.before.jobs[lease.job_id], step.before.held_by(lease)
        memory = (lease, type(report), report.execution if isinstance(report, Failed) else 0)
        if memory in self._taken:
            assert step.quiet, "a repeat changes nothing"
            self._expect_repeat(report, answer, *self._taken[memory], held=held)
        elif not held:
            assert step.refused(LeaseLost)
        elif job["cancel_requested_at"] is not None and isinstance(report, Succeeded | Failed):
            assert step.refused(CancelRequested)
        elif job["cancel_requested_at"] is None and isinstance(report, Cancelled):
            assert step.refused(IllegalTransition)
        else:
            assert isinstance(answer, Accepted)
            kind = _effect(job, report, self._stage.clock.now)
            assert step.news == {lease.job_id: [kind]}
            assert (answer.backoff is not None) == (kind == "execution_failed")
            self._take(lease, report, answer, cancelled=kind == "cancelled")
            self._check_result(step, lease.job_id, report)

    async def submit_all(self, report: Report) -> None:
        """Report the same about every lease that is held."""
        batch = [Outcome(lease=lease, report=report) for lease in self.present]
        step = await self._stage.step(
            f"submit all({len(batch)})", lambda: self._stage.services.execution.submit("last", batch)
        )
        assert all(isinstance(answer, Accepted) for answer in step.answer)

    def _take(self, lease: Lease, report: Report, answer: Accepted, *, cancelled: bool) -> None:
        if isinstance(report, Failed):
            self._executions[lease.lease_token] = report.execution
        # A run that ended cancelled may be confirmed in both ways.
        for kind in (Cancelled, Released) if cancelled else (type(report),):
            number = report.execution if isinstance(report, Failed) else 0
            self._taken[lease, kind, number] = report, answer
        self.sent.append(lambda: self.submit(lease, report))

    def _expect_repeat(
        self, report: Report, answer: Accepted | AijobsError, first: Report, then: Accepted, *, held: bool
    ) -> None:
        if isinstance(first, Succeeded) and first != report:
            assert isinstance(answer, LeaseLost), "another output"
        elif isinstance(report, Failed) and then.backoff is not None and not held:
            assert isinstance(answer, LeaseLost), "counted, but the run is no longer its own to go on with"
        else:
            assert isinstance(answer, Accepted), "a repeat is answered as the first one was"
            assert answer.job.job_id == then.job.job_id
            if then.job.lifecycle_status.terminal:
                assert (answer.job.lifecycle_status, answer.job.sequence) == (
                    then.job.lifecycle_status,
                    then.job.sequence,
                )
            assert answer.backoff == then.backoff, "also when more executions have failed since"

    @staticmethod
    def _check_result(step: Step[list[Accepted | AijobsError]], job_id: str, report: Report) -> None:
        """What is stored is what was reported."""
        if isinstance(report, Succeeded):
            stored = [(row["artifact_id"], row["content_json"]) for row in step.after.artifacts.get(job_id, ())]
            assert stored == [(artifact.artifact_id, artifact.content_json) for artifact in report.artifacts]
            assert step.after.jobs[job_id]["output_hash"] == report.output_hash
        elif isinstance(report, Failed):
            assert step.after.jobs[job_id]["retry_count"] == step.before.jobs[job_id]["retry_count"] + 1

    def _ready(self, step: Step[list[Locked | AijobsError]], job: Row, session: Session) -> bool:
        knows = KNOWN.get(session.executor_id, KNOWN["executor-1"])
        return job["queue"] not in step.before.paused and due(job, self._stage.clock.now) and job["job_type"] in knows

    def _note_lease(self, lease: Lease, session: Session) -> None:
        if lease not in self._holder:
            self.leases.append(lease)
            self._holder[lease] = session.executor_id


def lapses(jobs: dict[str, Row]) -> dict[str, list[str]]:
    """Say what a lapse makes of each of these jobs, if somebody holds it."""
    return {job_id: [_lapse(job)] for job_id, job in jobs.items() if leased(job)}


def _lapse(job: Row) -> str:
    if job["cancel_requested_at"] is not None:
        return "cancelled"
    return "lapsed" if job["takeover_count"] < MOST_TAKEOVERS else "failed"


def _effect(job: Row, report: Report, now: datetime) -> str:
    match report:
        case Succeeded():
            return "succeeded"
        case Failed():
            left = job["retry_count"] < job["max_retries"] and _has_time(job, now)
            again = report.code == RETRYABLE and left
            return "execution_failed" if again else "failed"
        case Cancelled():
            return "cancelled"
        case Released():
            return "handed_back" if job["cancel_requested_at"] is None else "cancelled"


def _has_time(job: Row, now: datetime) -> bool:
    """Tell whether the job's next execution would have a second, after its wait, of the time for all of them (EX-4)."""
    wait = timedelta(milliseconds=job["backoff_ms"] * 2 ** job["retry_count"])
    end = job["started_at"] + timedelta(milliseconds=job["run_timeout_ms"])
    return bool(now + wait + timedelta(seconds=1) <= end)


def _short(lease: Lease) -> str:
    return f"{lease.job_id[-6:]}.{lease.attempt} {lease.lease_token}"
