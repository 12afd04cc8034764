"""Creating jobs: job, snapshot, history and enqueue event in one transaction, or nothing (CR-1, CR-2).

Creates of one user are put in line by the user's row, which every create locks first. So a request id or an
idempotency key that is looked up under that lock cannot be inserted by somebody else in the meantime, and what is
counted for a limit or a quota is exact. A repeat is answered before anything is counted, so no quota refuses it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from uuid_utils import uuid7

from aijobs import canonical, metrics
from aijobs.errors import AijobsError, IdempotencyKeyReused, PlatformUnavailable, RequestIdReused
from aijobs.registry import Registry
from services.jobs import transitions
from services.jobs.admission import Admitted, NewJob, admit
from services.jobs.batches import write_each
from services.jobs.quotas import Quotas
from services.jobs.ranking import QueueOrder
from services.jobs.store import jobs as job_store
from services.jobs.store import platform, requests, users
from services.jobs.store.contents import Snapshot
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.ranks import Line
from services.jobs.wakeups import Wakeups

METHOD = "CreateJob"
DIFFERING_REPEATS = metrics.counter(
    "creates_request_differs", "Creates whose idempotency key named a job of another request", "job_type"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The job that now exists."""

    job: JobRow
    deduplicated: bool
    request_differs: bool


@dataclass(frozen=True, slots=True)
class _Create:
    """An admitted request and who made it."""

    admitted: Admitted
    caller: str

    @property
    def request(self) -> NewJob:
        return self.admitted.request

    @property
    def fingerprint(self) -> str:
        return self.admitted.fingerprint

    @property
    def request_key(self) -> requests.RequestKey:
        return requests.RequestKey(self.caller, self.request.user_id, METHOD, self.request.request_id)

    @property
    def line(self) -> Line:
        return line_of_request(self.admitted)

    @property
    def idempotency(self) -> tuple[str, str, str] | None:
        key = self.request.idempotency_key
        return (self.request.user_id, self.request.job_type, key) if key is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which job a request leads to."""

    job_id: str
    new: bool = False
    deduplicated: bool = False
    differs: bool = False


class JobCreation:
    """Creates jobs."""

    def __init__(
        self, database: Database, registry: Registry, wakeups: Wakeups, quotas: Quotas, order: QueueOrder
    ) -> None:
        self._database = database
        self._registry = registry
        self._wakeups = wakeups
        self._quotas = quotas
        self._order = order

    async def check(self, request: NewJob) -> None:
        """Check a request without writing anything.

        Raises:
            InvalidInput: or one of its children; names every field that is wrong.

        """
        admitted = await admit(self._registry, request)
        if isinstance(admitted, AijobsError):
            raise admitted

    async def create(self, caller: str, batch: Sequence[NewJob]) -> list[Created | AijobsError]:
        """Create jobs; each request gets its own job or its own error.

        Errors per item: what `admit` finds, RequestIdReused, IdempotencyKeyReused, TooManyJobs, QuotaExceeded,
        PlatformUnavailable.

        Args:
            caller: who asks; request ids are its own.
            batch: at most 100 requests.

        Raises:
            Unavailable: the database cannot be reached.

        """
        admitted = [await admit(self._registry, request) for request in batch]
        good = [_Create(item, caller) for item in admitted if isinstance(item, Admitted)]
        written = iter(await write_each(self._database, good, self._create))
        return [next(written) if isinstance(item, Admitted) else item for item in admitted]

    async def _create(self, tx: Transaction, batch: Sequence[_Create]) -> list[Created | AijobsError]:
        await users.lock(tx, (item.request.user_id for item in batch))
        answered = await requests.find(tx, (item.request_key for item in batch))
        known = await job_store.find_by_key(tx, (item.idempotency for item in batch if item.idempotency))
        # What this batch adds counts for its later items as if it had been there before.
        by_key = {key: (row.job_id, row.request_fingerprint) for key, row in known.items()}
        book = await self._quotas.open(tx, {item.request.user_id for item in batch})
        switch = await platform.read(tx)
        plans: list[_Plan | AijobsError] = []
        new: list[tuple[str, _Create]] = []
        fresh: list[requests.Answered] = []
        differing: list[str] = []
        for item in batch:
            memory = answered.get(item.request_key)
            plan = _plan(item, memory, by_key.get(item.idempotency) if item.idempotency else None)
            if isinstance(plan, _Plan) and plan.new:
                if not switch.available:
                    plan = _refused(switch)
                elif (problem := book.admit(item.request.user_id, item.request.job_type)) is not None:
                    plan = problem
            plans.append(plan)
            if memory is None and _asks_for_another_job(plan):
                differing.append(item.request.job_type)
            if isinstance(plan, AijobsError) or memory is not None:
                continue
            if plan.new:
                new.append((plan.job_id, item))
                if item.idempotency:
                    by_key[item.idempotency] = (plan.job_id, item.fingerprint)
            answered[item.request_key] = _remembered(item, plan)
            fresh.append(answered[item.request_key])
        ranks = await self._ranks(tx, [item for _, item in new])
        jobs = [new_row(job_id, item.admitted, rank) for (job_id, item), rank in zip(new, ranks, strict=True)]
        rows = await transitions.begin(tx, self._wakeups, jobs, actor=f"caller:{batch[0].caller}")
        await book.write(tx)
        await requests.remember(tx, fresh)
        tx.after_commit(lambda: _count_differing(differing))
        earlier = {plan.job_id for plan in plans if isinstance(plan, _Plan)} - rows.keys()
        if earlier:
            rows |= await job_store.get(tx, earlier)
        return [
            Created(job=rows[plan.job_id], deduplicated=plan.deduplicated, request_differs=plan.differs)
            if isinstance(plan, _Plan)
            else plan
            for plan in plans
        ]

    async def _ranks(self, tx: Transaction, new: Sequence[_Create]) -> list[datetime | None]:
        """Give the jobs that are due their places in the order; the others get theirs once they are due."""
        if not new:
            return []
        ranking = await self._order.open(tx, {item.line for item in new})
        ranks = [
            ranking.rank(item.line) if item.request.run_at is None or item.request.run_at <= ranking.read_at else None
            for item in new
        ]
        await ranking.write(tx)
        return ranks


def line_of_request(admitted: Admitted) -> Line:
    """Return the line in which the job of a request will stand."""
    request, routing = admitted.request, admitted.definition.routing
    priority = routing.default_priority if request.priority is None else request.priority
    return Line(request.user_id, str(routing.queue), priority)


def new_row(job_id: str, admitted: Admitted, rank_at: datetime | None) -> tuple[dict[str, Any], Snapshot]:
    """Return the columns of a new job, without those that all new jobs share, and its snapshot."""
    request, definition, line = admitted.request, admitted.definition, line_of_request(admitted)
    row = {
        "job_id": job_id,
        "job_type": request.job_type,
        "user_id": request.user_id,
        "target_type": request.target_type,
        "target_id": request.target_id,
        "queue": line.queue,
        "priority": line.priority,
        "labels_json": canonical.dump(dict(request.labels)),
        "idempotency_key": request.idempotency_key,
        "request_fingerprint": admitted.fingerprint,
        "definition_version": definition.metadata.version,
        "cancellable": definition.execution.cancellable,
        "max_retries": definition.max_retries,
        "backoff_ms": definition.backoff // timedelta(milliseconds=1),
        "abort_strategy": definition.execution.abort_strategy,
        "run_timeout_ms": definition.run_timeout // timedelta(milliseconds=1),
        "run_at": request.run_at,
        "due_at": request.run_at,
        "rank_at": rank_at,
        "root_job_id": job_id,
        "trace_context": request.trace_context,
    }
    return row, Snapshot(schema_version=definition.input.version, content_json=admitted.snapshot_json)


def _asks_for_another_job(plan: _Plan | AijobsError) -> bool:
    return plan.differs if isinstance(plan, _Plan) else isinstance(plan, IdempotencyKeyReused)


def _count_differing(job_types: Sequence[str]) -> None:
    for job_type in job_types:
        DIFFERING_REPEATS.labels(job_type).inc()


def _refused(switch: platform.Availability) -> PlatformUnavailable:
    return PlatformUnavailable("no jobs are created at the moment" + (f": {switch.reason}" if switch.reason else ""))


def _plan(item: _Create, memory: requests.Answered | None, earlier: tuple[str, str] | None) -> _Plan | AijobsError:
    """Decide what a request leads to: the answer it was given before, the job of its key, or a new job.

    Args:
        item: the request.
        memory: what was answered to its request id.
        earlier: the job of its idempotency key, with the fingerprint of the request that made it.

    """
    if memory is not None:
        if memory.fingerprint != item.fingerprint:
            return RequestIdReused()
        answer = json.loads(memory.answer_json)
        return _Plan(job_id=memory.job_id, deduplicated=answer["deduplicated"], differs=answer["requestDiffers"])
    if earlier is None:
        return _Plan(job_id=str(uuid7()), new=True)
    job_id, fingerprint = earlier
    differs = fingerprint != item.fingerprint
    if differs and item.request.strict_idempotency:
        return IdempotencyKeyReused(f"idempotency_key: job {job_id} was created with it by another request")
    return _Plan(job_id=job_id, deduplicated=True, differs=differs)


def _remembered(item: _Create, plan: _Plan) -> requests.Answered:
    return requests.Answered(
        key=item.request_key,
        fingerprint=item.fingerprint,
        job_id=plan.job_id,
        answer_json=json.dumps({"deduplicated": plan.deduplicated, "requestDiffers": plan.differs}),
    )
