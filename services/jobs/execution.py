"""What executors report about runs, and what follows from it (EX-2, PJ-2).

Every report carries the fence (job, attempt, lease token). The rows of a batch are locked first, in the order of their
ids; what is decided about them is decided on locked rows and written by guarded statements.

A report may arrive twice, because the first answer was lost. Its history entry carries the lease token (and the number
of the execution), so the second arrival is recognised there and answered as the first one was (ruling 33).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from aijobs.definition import wait_before_retry
from aijobs.errors import AijobsError, JobNotFound, LeaseLost, NotAttempted
from aijobs.failures import Again, treatment
from aijobs.states import JobState
from services.jobs import lifecycle, projections, transitions
from services.jobs.batches import write_each
from services.jobs.lifecycle import Lease
from services.jobs.projections import Projections
from services.jobs.results import Succeeded
from services.jobs.store import executors, history
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change, Kind
from services.jobs.store.database import Database, Transaction
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

#: No execution is begun that would have less time than the shortest one that can be defined.
SHORTEST_EXECUTION = timedelta(seconds=1)
LONGEST_INTERNAL = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One execution of a run failed. `retry_after` is how long the provider wants to be left alone."""

    execution: int
    code: str
    internal: str
    feedback: str
    retry_after: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A run stopped because a cancel was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A run is given back; `delay` makes the job wait before it is dispatched again."""

    reason: str
    delay: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A report about one run."""

    lease: Lease
    report: Succeeded | Failed | Cancelled | Released


@dataclass(frozen=True, slots=True)
class _Checked:
    """A report, its projection, and what is wrong with its contents."""

    outcome: Outcome
    projection: projections.Checked = projections.NOTHING
    problem: AijobsError | None = None

    @property
    def job_id(self) -> str:
        return self.outcome.lease.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a report led to. `backoff` is set when the run may try again."""

    job: JobRow
    backoff: timedelta | None = None


class JobExecution:
    """Takes in what the holders of leases report."""

    def __init__(self, database: Database, wakeups: Wakeups, committed: Projections) -> None:
        self._database = database
        self._wakeups = wakeups
        self._projections = committed

    async def submit(self, executor_id: str, batch: Sequence[Outcome]) -> list[Accepted | AijobsError]:
        """Store what became of runs.

        Errors per item: LeaseLost, CancelRequested, IllegalTransition, InvalidInput.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, items: Sequence[_Checked]) -> list[Accepted | AijobsError]:
            await executors.sign(tx, executor_id)
            return await self._submit(tx, items)

        return await write_each(self._database, [await self._checked(item) for item in batch], work)

    async def _checked(self, item: Outcome) -> _Checked:
        if not isinstance(item.report, Succeeded):
            return _Checked(item)
        projection = await self._projections.check(item.lease.job_id, item.report)
        return _Checked(item, problem=projection) if isinstance(projection, AijobsError) else _Checked(item, projection)

    async def _submit(self, tx: Transaction, batch: Sequence[_Checked]) -> list[Accepted | AijobsError]:
        await self._projections.prepare(tx, [(item.job_id, item.projection) for item in batch])
        rows = await job_store.get(tx, (item.job_id for item in batch), lock=True)
        past = await history.of_leases(tx, [(item.job_id, item.outcome.lease.attempt) for item in batch])
        results: list[Accepted | AijobsError | None] = []
        planned: dict[str, Change] = {}
        taken: dict[str, _Checked] = {}
        for item in batch:
            job = rows.get(item.job_id)
            if job is None:
                results.append(JobNotFound(item.job_id))
            elif (earlier := _reported_before(item.outcome, past)) is not None:
                results.append(self._repeat(job, item.outcome, earlier, past))
            elif item.problem is not None:
                # Only now: a repeat is not judged anew, by a replica that may know other job types.
                results.append(item.problem)
            elif job.job_id in taken:
                again = item.outcome == taken[job.job_id].outcome
                results.append(None if again else NotAttempted("another report of this job is in the batch"))
            else:
                try:
                    change = await self._change(tx, job, item.outcome)
                    await self._projections.require(tx, job, item.projection)
                except AijobsError as error:
                    results.append(error)
                else:
                    planned[job.job_id], taken[job.job_id] = change, item
                    results.append(None)
        rows |= await transitions.carry_out(tx, self._wakeups, list(planned.values()))
        await self._projections.write(tx, {job_id: item.projection for job_id, item in taken.items()}, rows)
        return [
            result
            if result is not None
            else Accepted(
                job=rows[item.job_id],
                backoff=_backoff(rows[item.job_id], item.outcome, retries=rows[item.job_id].retry_count),
            )
            for item, result in zip(batch, results, strict=True)
        ]

    async def _change(self, tx: Transaction, job: JobRow, item: Outcome) -> Change:
        match item.report:
            case Succeeded() as report:
                return lifecycle.succeed(
                    job,
                    item.lease,
                    output_json=report.output_json,
                    output_hash=report.output_hash,
                    artifact_count=len(report.artifacts),
                )
            case Failed() as report:
                internal = report.internal[:LONGEST_INTERNAL]
                if await self._may_run_again(tx, job, report):
                    return lifecycle.note_execution_failed(
                        job,
                        item.lease,
                        execution=report.execution,
                        code=report.code,
                        internal=internal,
                        feedback=report.feedback,
                    )
                return lifecycle.fail(
                    job,
                    item.lease,
                    execution=report.execution,
                    code=report.code,
                    public=treatment(report.code).public,
                    internal=internal,
                )
            case Cancelled():
                return lifecycle.cancel_running(job, item.lease)
            case Released() as report:
                return lifecycle.hand_back(job, item.lease, reason=report.reason, delay=report.delay)

    async def _may_run_again(self, tx: Transaction, job: JobRow, report: Failed) -> bool:
        """Decide by the taxonomy whether a failed execution is followed by another one (EX-2).

        None is if it could only begin when the run's time is over, by a long Retry-After for instance (EX-4).
        """
        if job.retry_count >= job.max_retries:
            return False
        wait, remaining = _wait(job, report, retries=job.retry_count + 1), job.run_remaining
        if remaining is not None and wait + SHORTEST_EXECUTION > remaining:
            return False
        match treatment(report.code).again:
            case Again.YES:
                return True
            case Again.NEVER:
                return False
            case Again.BY_ABORT_STRATEGY:
                return job.abort_strategy == "retry"
            case Again.ONCE:
                earlier = await history.failed_executions(tx, [job.job_id])
                return not any(treatment(entry.reason).again == Again.ONCE for entry in earlier.get(job.job_id, ()))

    @staticmethod
    def _repeat(job: JobRow, item: Outcome, earlier: HistoryRow, past: Sequence[HistoryRow]) -> Accepted | AijobsError:
        if isinstance(item.report, Succeeded) and job.output_hash != item.report.output_hash:
            return LeaseLost(f"job {job.job_id}: already reported with another output")
        if earlier.kind == Kind.EXECUTION_FAILED and not lifecycle.holds(job, item.lease):
            # Counted then, but the run is no longer the caller's to go on with (LC-5).
            return lifecycle.lost(item.lease)
        since = sum(
            entry.job_id == job.job_id and entry.kind == Kind.EXECUTION_FAILED and entry.sequence > earlier.sequence
            for entry in past
        )
        return Accepted(job=job, backoff=_backoff(job, item, retries=job.retry_count - since))


REPORT_KINDS: Mapping[type, frozenset[Kind]] = {
    Succeeded: frozenset({Kind.SUCCEEDED}),
    Failed: frozenset({Kind.EXECUTION_FAILED, Kind.FAILED}),
    Cancelled: frozenset({Kind.CANCELLED}),
    Released: frozenset({Kind.HANDED_BACK, Kind.CANCELLED}),
}


def _reported_before(item: Outcome, past: Sequence[HistoryRow]) -> HistoryRow | None:
    execution = item.report.execution if isinstance(item.report, Failed) else None
    for entry in past:
        if (
            (entry.job_id, entry.attempt, entry.lease_token)
            == (item.lease.job_id, item.lease.attempt, item.lease.lease_token)
            and entry.kind in REPORT_KINDS[type(item.report)]
            and entry.execution == execution
        ):
            return entry
    return None


def _backoff(job: JobRow, item: Outcome, *, retries: int) -> timedelta | None:
    """Return the wait before the run's next execution; None if none follows."""
    if not isinstance(item.report, Failed) or job.lifecycle_status != JobState.RUNNING:
        return None
    return _wait(job, item.report, retries=retries)


def _wait(job: JobRow, report: Failed, *, retries: int) -> timedelta:
    return max(wait_before_retry(timedelta(milliseconds=job.backoff_ms), retries), report.retry_after)
