"""Follow-up jobs: what the result of one job calls for, created in the transaction of its success (PJ-3, ruling 12).

They belong to the user of the job they follow, are of its chain (`root_job_id`), and have a key of their own each, so
that a repeated result cannot create them twice. No quota refuses them: the result is there, and what follows from it is
part of it. A chain has at most five jobs after its first, so that a job type that follows itself comes to an end.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from uuid_utils import uuid7

from aijobs import canonical
from aijobs.errors import AijobsError, FieldViolation, InvalidInput
from aijobs.job_type import DEEPEST
from aijobs.registry import Registry
from services.jobs import transitions
from services.jobs.admission import FOLLOW_UP_KEY, Admitted, NewJob, admit
from services.jobs.creation import line_of_request, new_row
from services.jobs.lifecycle import ENGINE
from services.jobs.ranking import QueueOrder
from services.jobs.results import FollowUp, parsed
from services.jobs.store import jobs as job_store
from services.jobs.store import users
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

MOST_FOLLOW_UPS = 20
#: Stands for the user until the job's row has been read.
NOBODY = "nobody"


class FollowUpJobs:
    """Checks and creates follow-up jobs."""

    def __init__(self, registry: Registry, wakeups: Wakeups, order: QueueOrder) -> None:
        self._registry = registry
        self._wakeups = wakeups
        self._order = order

    async def admit(self, job_id: str, wanted: Sequence[FollowUp]) -> list[Admitted]:
        """Check what a result calls for, before any transaction.

        Raises:
            InvalidInput: names every field that is wrong, below `succeeded.projection.follow_ups`.

        """
        if len(wanted) > MOST_FOLLOW_UPS:
            raise InvalidInput.field(_place(), f"{len(wanted)}; at most {MOST_FOLLOW_UPS}")
        admitted: list[Admitted] = []
        problems: list[FieldViolation] = []
        for index, follow_up in enumerate(wanted):
            result = await self._admit(job_id, index, follow_up)
            if isinstance(result, Admitted):
                admitted.append(result)
            elif isinstance(result, InvalidInput) and result.violations:
                problems += [replace(found, field=f"{_place(index)}.{found.field}") for found in result.violations]
            else:
                problems.append(FieldViolation(_place(index), result.message))
        if problems:
            raise InvalidInput.fields(problems)
        return admitted

    async def _admit(self, job_id: str, index: int, wanted: FollowUp) -> Admitted | AijobsError:
        try:
            value = await parsed(wanted.input_json)
        except canonical.NotStrictJson as error:
            return InvalidInput.field("input_json", str(error))
        request = NewJob(
            request_id=f"{FOLLOW_UP_KEY}{job_id}:{index + 1}",
            user_id=NOBODY,
            job_type=wanted.job_type,
            target_type="",
            target_id="",
            input=value,
            input_size=len(wanted.input_json.encode()),
            idempotency_key=None,
            strict_idempotency=False,
            labels={},
            priority=None,
        )
        return await admit(self._registry, request)

    @staticmethod
    def require_depth(parent: JobRow, admitted: Sequence[Admitted]) -> None:
        """Refuse what would make a chain too deep.

        Raises:
            InvalidInput: it would.

        """
        if admitted and parent.depth >= DEEPEST:
            raise InvalidInput.field(
                _place(), f"this job is the {DEEPEST}th after the first of a chain; chains are not longer"
            )

    @staticmethod
    async def lock_users(tx: Transaction, parents: Iterable[str]) -> None:
        """Put creates of the users of these jobs in line; comes before the jobs in the order of locks."""
        rows = await job_store.get(tx, parents)
        if rows:
            await users.lock(tx, {row.user_id for row in rows.values()})

    async def create(
        self, tx: Transaction, wanted: Mapping[str, Sequence[Admitted]], rows: Mapping[str, JobRow]
    ) -> None:
        """Create follow-up jobs.

        Args:
            tx: holds the rows of their users, by `lock_users`.
            wanted: by the job that they follow.
            rows: of the jobs that they follow.

        """
        new = [
            (rows[parent], _of(rows[parent], number, item))
            for parent, admitted in wanted.items()
            for number, item in enumerate(admitted, start=1)
        ]
        if not new:
            return
        lines = [line_of_request(item) for _, item in new]
        ranking = await self._order.open(tx, set(lines))
        jobs = []
        for (parent, item), line in zip(new, lines, strict=True):
            row, snapshot = new_row(str(uuid7()), item, ranking.rank(line))
            row |= {
                "root_job_id": parent.root_job_id or parent.job_id,
                "parent_job_id": parent.job_id,
                "depth": parent.depth + 1,
            }
            jobs.append((row, snapshot))
        await ranking.write(tx)
        await transitions.begin(tx, self._wakeups, jobs, actor=ENGINE, reason="called for by a result")


def _of(parent: JobRow, number: int, item: Admitted) -> Admitted:
    """Make a checked job one of its parent's user."""
    key = f"{FOLLOW_UP_KEY}{parent.job_id}:{number}"
    request = replace(
        item.request,
        user_id=parent.user_id,
        target_type=parent.target_type,
        target_id=parent.target_id,
        labels=json.loads(parent.labels_json),
        trace_context=parent.trace_context,
        idempotency_key=key,
    )
    # Nobody else can ask under this key, so it says all that a fingerprint has to; the input may be large.
    return replace(item, request=request, fingerprint=canonical.digest(key))


def _place(index: int | None = None) -> str:
    field = "succeeded.projection.follow_ups"
    return field if index is None else f"{field}[{index}]"
