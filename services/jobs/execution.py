"""What executors report about runs: lock, heartbeat, outcome (LC-4…LC-6, EX-2, PJ-2).

Every report carries the fence (job, attempt, lease token). The rows of a batch are locked first, in the order of their
ids; what is decided about them is decided on locked rows and written by guarded statements.

A report may arrive twice, because the first answer was lost. Its history entry carries the lease token (and the number
of the execution), so the second arrival is recognised there and answered as the first one was (ruling 33).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from aijobs import canonical
from aijobs.errors import (
    AijobsError,
    FieldViolation,
    InternalError,
    InvalidInput,
    JobNotFound,
    LeaseConflict,
    LeaseLost,
    NotAttempted,
)
from aijobs.failures import Again, treatment
from aijobs.identifiers import is_identifier, rule
from aijobs.states import JobState
from services.jobs import events, lifecycle
from services.jobs.batches import write_each
from services.jobs.lifecycle import Lease
from services.jobs.store import changes, contents, history, outbox
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change, Kind
from services.jobs.store.contents import ArtifactRow, Snapshot
from services.jobs.store.database import Database, Transaction
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow, Renewal
from services.jobs.wakeups import Wakeups

#: Output and projection of one job together.
LARGEST_RESULT = 2 * 1024 * 1024
MOST_ARTIFACTS = 200
LONGEST_ARTIFACT_TYPE = 64
HIGHEST_ORDINAL = 2**31 - 1
#: Results above this are checked in a thread, so that nobody's heartbeat waits for them.
LARGE_RESULT = 16 * 1024
#: Snapshots in one answer to a lock; gRPC takes 4 MiB.
LARGEST_LOCK_ANSWER = 3 * 1024 * 1024
#: Ids, names and times of one job in an answer, all of them at their longest.
OTHER_FIELDS = 2048
MOST_EARLIER_ERRORS = 5
LONGEST_BACKOFF = timedelta(minutes=10)
LONGEST_INTERNAL = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """A wish for one job's lease. The token is made by the executor, so that a repeat is recognised."""

    job_id: str
    lease_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A lease and what is needed to run the job."""

    job: JobRow
    remaining: timedelta
    snapshot: Snapshot
    earlier_errors: Sequence[HistoryRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """A heartbeat for one run."""

    lease: Lease
    progress: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """The lease goes on."""

    remaining: timedelta
    cancel_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """A run has a validated output."""

    output_json: str
    output_hash: str
    artifacts: Sequence[ArtifactRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One execution of a run failed."""

    execution: int
    code: str
    internal: str
    feedback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A run stopped because a cancel was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A report about one run."""

    lease: Lease
    report: Succeeded | Failed | Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a report led to. `backoff` is set when the run may try again."""

    job: JobRow
    backoff: timedelta | None = None


class JobExecution:
    """Hands out leases and takes in what their holders report."""

    def __init__(self, database: Database, wakeups: Wakeups, lease_time: timedelta) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lease_time = lease_time

    async def lock(self, executor_id: str, batch: Sequence[LockRequest]) -> list[Locked | AijobsError]:
        """Take leases. Of N executors that want a job exactly one gets it.

        Errors per item: JobNotFound, IllegalTransition (it has ended), LeaseConflict, NotAttempted (too much for one
        answer: ask again).

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction, items: Sequence[LockRequest]) -> list[Locked | AijobsError]:
            return await self._lock(tx, executor_id, items)

        return await write_each(self._database, batch, work)

    async def extend(self, batch: Sequence[Extend]) -> list[Extended | AijobsError]:
        """Renew leases and store progress.

        Errors per item: LeaseLost.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await write_each(self._database, batch, self._extend)

    async def submit(self, batch: Sequence[Outcome]) -> list[Accepted | AijobsError]:
        """Store what became of runs.

        Errors per item: LeaseLost, CancelRequested, IllegalTransition, InvalidInput.

        Raises:
            Unavailable: the database cannot be reached.

        """
        checked = [await _checked(item) for item in batch]
        good = [item for item in checked if isinstance(item, Outcome)]
        stored = iter(await write_each(self._database, good, self._submit))
        return [next(stored) if isinstance(item, Outcome) else item for item in checked]

    async def _lock(
        self, tx: Transaction, executor_id: str, batch: Sequence[LockRequest]
    ) -> list[Locked | AijobsError]:
        rows = await job_store.get(tx, (item.job_id for item in batch), lock=True)
        snapshots = await contents.snapshots(tx, rows)
        errors = await history.failed_executions(tx, [job.job_id for job in rows.values() if job.retry_count])
        room = LARGEST_LOCK_ANSWER
        refusals: dict[int, AijobsError] = {}
        granted: dict[str, Change] = {}
        for index, item in enumerate(batch):
            try:
                job, snapshot = rows.get(item.job_id), snapshots.get(item.job_id)
                change = self._grant(executor_id, item, job, granted.get(item.job_id))
                if job is None or snapshot is None:
                    raise InternalError(f"job {item.job_id} has no snapshot")
                size = _answer_size(job, snapshot, errors.get(item.job_id, ()))
                if size > room and index > 0:
                    raise NotAttempted("the answer is full")
                room -= size
                if change is not None:
                    granted[item.job_id] = change
            except AijobsError as error:
                refusals[index] = error
        await self._apply(tx, list(granted.values()))
        rows = await job_store.get(tx, [item.job_id for index, item in enumerate(batch) if index not in refusals])
        return [
            refusals[index]
            if index in refusals
            else Locked(
                job=rows[item.job_id],
                remaining=(rows[item.job_id].lock_until or rows[item.job_id].read_at) - rows[item.job_id].read_at,
                snapshot=snapshots[item.job_id],
                earlier_errors=errors.get(item.job_id, [])[-MOST_EARLIER_ERRORS:],
            )
            for index, item in enumerate(batch)
        ]

    def _grant(self, executor_id: str, item: LockRequest, job: JobRow | None, earlier: Change | None) -> Change | None:
        """Return the change that gives an item its lease; None if it has it already, by a repeat."""
        if job is None:
            raise JobNotFound(item.job_id)
        if earlier is not None:
            # The same job twice in one batch: the first one has it, and the second one only if it is the same.
            if earlier.lease_token != item.lease_token:
                raise LeaseConflict(f"job {item.job_id} is leased")
            return None
        if self._already_locked(job, item):
            return None
        return lifecycle.lock(job, item.lease_token, executor_id, self._lease_time)

    @staticmethod
    def _already_locked(job: JobRow, item: LockRequest) -> bool:
        return job.lifecycle_status == JobState.RUNNING and job.lease_token == item.lease_token

    async def _extend(self, tx: Transaction, batch: Sequence[Extend]) -> list[Extended | AijobsError]:
        rows = await job_store.get(tx, (item.lease.job_id for item in batch), lock=True)
        renewals = [
            Renewal(
                job_id=item.lease.job_id,
                attempt=item.lease.attempt,
                lease_token=item.lease.lease_token,
                progress=item.progress,
            )
            for item in batch
            if _held(rows, item.lease)
        ]
        if await job_store.extend(tx, renewals, self._lease_time) != len(renewals):
            raise changes.StaleChange("a lease changed while it was renewed")
        moved = [renewal.job_id for renewal in renewals if renewal.progress is not None]
        if moved:
            tx.after_commit(lambda: self._wakeups.jobs_changed(moved))
        return [
            Extended(
                remaining=self._lease_time, cancel_requested=rows[item.lease.job_id].cancel_requested_at is not None
            )
            if _held(rows, item.lease)
            else LeaseLost(f"job {item.lease.job_id}: attempt {item.lease.attempt} no longer holds the lease")
            for item in batch
        ]

    async def _submit(self, tx: Transaction, batch: Sequence[Outcome]) -> list[Accepted | AijobsError]:
        rows = await job_store.get(tx, (item.lease.job_id for item in batch), lock=True)
        past = await history.of_leases(tx, [(item.lease.job_id, item.lease.attempt) for item in batch])
        results: list[Accepted | AijobsError | None] = []
        planned: dict[str, Change] = {}
        reports: dict[str, Outcome] = {}
        artifacts: list[ArtifactRow] = []
        for item in batch:
            job = rows.get(item.lease.job_id)
            if job is None:
                results.append(JobNotFound(item.lease.job_id))
            elif (earlier := _reported_before(item, past)) is not None:
                results.append(self._repeat(job, item, earlier))
            elif job.job_id in planned:
                again = item == reports[job.job_id]
                results.append(None if again else NotAttempted("another report of this job is in the batch"))
            else:
                try:
                    planned[job.job_id] = await self._change(tx, job, item)
                except AijobsError as error:
                    results.append(error)
                else:
                    results.append(None)
                    reports[job.job_id] = item
                    if isinstance(item.report, Succeeded):
                        artifacts += item.report.artifacts
        await self._apply(tx, list(planned.values()))
        await contents.insert_artifacts(tx, artifacts)
        rows = await job_store.get(tx, planned)
        await outbox.append(tx, [events.of_end(rows[job_id]) for job_id in planned if rows[job_id].finished_at])
        return [
            result
            if result is not None
            else Accepted(job=rows[item.lease.job_id], backoff=_backoff(rows[item.lease.job_id], item))
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
                if await self._may_run_again(tx, job, report.code):
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

    async def _may_run_again(self, tx: Transaction, job: JobRow, code: str) -> bool:
        """Decide by the taxonomy whether a failed execution is followed by another one (EX-2)."""
        if job.retry_count >= job.max_retries:
            return False
        match treatment(code).again:
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
    def _repeat(job: JobRow, item: Outcome, earlier: HistoryRow) -> Accepted | AijobsError:
        if isinstance(item.report, Succeeded) and job.output_hash != item.report.output_hash:
            return LeaseLost(f"job {job.job_id}: already reported with another output")
        if earlier.kind == Kind.EXECUTION_FAILED and not lifecycle.holds(job, item.lease):
            # Counted then, but the run is no longer the caller's to go on with (LC-5).
            return LeaseLost(f"job {job.job_id}: attempt {item.lease.attempt} no longer holds the lease")
        return Accepted(job=job, backoff=_backoff(job, item))

    async def _apply(self, tx: Transaction, planned: Sequence[Change]) -> None:
        await changes.apply(tx, planned)
        if planned:
            job_ids = [change.job_id for change in planned]
            tx.after_commit(lambda: self._wakeups.jobs_changed(job_ids))
            if any(change.to_state.terminal for change in planned):
                tx.after_commit(self._wakeups.events.give)


def _answer_size(job: JobRow, snapshot: Snapshot, errors: Sequence[HistoryRow]) -> int:
    """Bound the bytes that a locked job takes in an answer."""
    texts = [snapshot.content_json, job.labels_json]
    texts += [entry.feedback or "" for entry in errors[-MOST_EARLIER_ERRORS:]]
    return sum(len(text.encode()) for text in texts) + OTHER_FIELDS


def _held(rows: Mapping[str, JobRow], lease: Lease) -> bool:
    job = rows.get(lease.job_id)
    return job is not None and lifecycle.holds(job, lease)


REPORT_KINDS: Mapping[type, frozenset[Kind]] = {
    Succeeded: frozenset({Kind.SUCCEEDED}),
    Failed: frozenset({Kind.EXECUTION_FAILED, Kind.FAILED}),
    Cancelled: frozenset({Kind.CANCELLED}),
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


def _backoff(job: JobRow, item: Outcome) -> timedelta | None:
    """Return the wait before the run's next execution, doubling with each failed one; None if none follows."""
    if not isinstance(item.report, Failed) or job.lifecycle_status != JobState.RUNNING:
        return None
    return min(timedelta(milliseconds=job.backoff_ms) * (1 << job.retry_count - 1), LONGEST_BACKOFF)


async def _checked(item: Outcome) -> Outcome | AijobsError:
    """Check a result before the transaction, and a large one beside the event loop."""
    if not isinstance(item.report, Succeeded):
        return item
    size = len(item.report.output_json) + sum(len(artifact.content_json or "") for artifact in item.report.artifacts)
    try:
        if size <= LARGE_RESULT:
            _check_result(item.lease.job_id, item.report)
        else:
            await asyncio.to_thread(_check_result, item.lease.job_id, item.report)
    except AijobsError as error:
        return error
    return item


def _check_result(job_id: str, report: Succeeded) -> None:
    """Refuse a result that could not be given back as it was hashed, or that would break a constraint."""
    size = len(report.output_json.encode()) + sum(len((a.content_json or "").encode()) for a in report.artifacts)
    if size > LARGEST_RESULT:
        raise InvalidInput.field("succeeded", f"output and artifacts are {size} bytes; at most {LARGEST_RESULT}")
    problems: list[FieldViolation] = []
    try:
        if canonical.dump(canonical.parse(report.output_json)) != report.output_json:
            problems.append(FieldViolation("succeeded.output_json", "not in RFC 8785 canonical form"))
    except canonical.NotStrictJson as error:
        problems.append(FieldViolation("succeeded.output_json", str(error)))
    if canonical.digest(report.output_json) != report.output_hash:
        problems.append(FieldViolation("succeeded.output_hash", "not the SHA-256 of output_json"))
    problems += _artifact_violations(job_id, report.artifacts)
    if problems:
        raise InvalidInput.fields(problems)


def _artifact_violations(job_id: str, artifacts: Sequence[ArtifactRow]) -> list[FieldViolation]:
    if len(artifacts) > MOST_ARTIFACTS:
        return [FieldViolation("succeeded.projection.artifacts", f"{len(artifacts)}; at most {MOST_ARTIFACTS}")]
    problems: list[FieldViolation] = []
    seen: set[tuple[str, object]] = set()
    for index, artifact in enumerate(artifacts):
        field = f"succeeded.projection.artifacts[{index}]"
        if artifact.job_id != job_id:
            problems.append(FieldViolation(field, "belongs to another job"))
        if not is_identifier(artifact.artifact_type, most=LONGEST_ARTIFACT_TYPE):
            problems.append(FieldViolation(f"{field}.type", rule(most=LONGEST_ARTIFACT_TYPE)))
        if not is_identifier(artifact.artifact_id):
            problems.append(FieldViolation(f"{field}.id", rule()))
        if not 0 <= artifact.ordinal <= HIGHEST_ORDINAL:
            problems.append(FieldViolation(f"{field}.ordinal", "must not be negative"))
        for part in (artifact.artifact_id, artifact.ordinal):
            if (artifact.artifact_type, part) in seen:
                problems.append(FieldViolation(field, f"{artifact.artifact_type} {part} twice"))
            seen.add((artifact.artifact_type, part))
        try:
            canonical.parse(artifact.content_json or "")
        except canonical.NotStrictJson as error:
            problems.append(FieldViolation(f"{field}.content_json", str(error)))
    return problems
