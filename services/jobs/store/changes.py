"""Statements that write the state of a job: one INSERT for its beginning, one guarded UPDATE for everything after.

Nothing else in this repository writes `jobs.lifecycle_status` (LC-3, checked by a test), and only `lifecycle.py`
builds a `Change`, so an illegal change cannot be written down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, bindparam, insert, update

from aijobs.states import LEGAL_CHANGES, JobState
from services.jobs.store.database import Transaction
from services.jobs.store.tables import job_history, jobs
from services.jobs.store.time import now


class Kind(StrEnum):
    """What a history entry is about."""

    CREATED = "created"
    RETRIED = "retried"
    DISPATCHED_AGAIN = "dispatched_again"
    LOCKED = "locked"
    EXECUTION_FAILED = "execution_failed"
    CANCEL_REQUESTED = "cancel_requested"
    LAPSED = "lapsed"
    HANDED_BACK = "handed_back"
    TAKEN_OVER = "taken_over"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one job, with the history entry that is written beside it.

    Attributes:
        guard: columns that must still hold these values, besides the state and the sequence.
        values: columns to set, to a value or an SQL expression, besides the state and the sequence.
        sequence: number of the history entry; the row must still be at the number before.

    Raises:
        ValueError: the pair of states is not legal (LC-2).

    """

    job_id: str
    kind: Kind
    from_state: JobState
    to_state: JobState
    sequence: int
    attempt: int
    actor: str
    reason: str = ""
    lease_token: str | None = None
    execution: int | None = None
    feedback: str | None = None
    internal: str | None = None
    guard: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stays = self.from_state == self.to_state and not self.from_state.terminal
        if not stays and (self.from_state, self.to_state) not in LEGAL_CHANGES:
            raise ValueError(f"no change from {self.from_state} to {self.to_state}")


class StaleChange(Exception):
    """A guarded UPDATE met a row that is not as it was read. The transaction must be rolled back."""


async def insert_queued(
    tx: Transaction, rows: Sequence[Mapping[str, Any]], *, actor: str, kind: Kind = Kind.CREATED, reason: str = ""
) -> None:
    """Insert new jobs, queued, each with the first entry of its history. `rows` leave out what every new job shares."""
    shared = {
        "lifecycle_status": JobState.QUEUED,
        "progress": 0,
        "retry_count": 0,
        "takeover_count": 0,
        "attempt": 0,
        "dispatch_no": 1,
        "sequence": 1,
        "artifact_count": 0,
    }
    await tx.execute(insert(jobs).values(created_at=now()), [{**shared, **row} for row in rows])
    created = {
        "sequence": 1,
        "kind": kind,
        "to_state": JobState.QUEUED,
        "attempt": 0,
        "actor": actor,
        "reason": reason,
    }
    await tx.execute(insert(job_history).values(at=now()), [{**created, "job_id": row["job_id"]} for row in rows])


async def apply(tx: Transaction, changes: Sequence[Change]) -> None:
    """Apply changes, at most one a job, and append their history entries.

    Raises:
        StaleChange: a row was not as its change expects; nothing of this transaction may be committed.

    """
    if not changes:
        return
    ordered = sorted(changes, key=lambda change: (_shape(change), change.job_id))
    for _, group in groupby(ordered, key=_shape):
        await _update(tx, list(group))
    await tx.execute(insert(job_history).values(at=now()), [_entry(change) for change in ordered])


def _shape(change: Change) -> tuple[str, ...]:
    return (change.kind, *sorted(change.guard), "|", *sorted(change.values))


async def _update(tx: Transaction, changes: Sequence[Change]) -> None:
    first = changes[0]
    expressions = {name: value for name, value in first.values.items() if isinstance(value, ColumnElement)}
    plain = [name for name in first.values if name not in expressions]
    statement = (
        update(jobs)
        .where(
            jobs.c.job_id == bindparam("g_job_id"),
            jobs.c.lifecycle_status == bindparam("g_state"),
            jobs.c.sequence == bindparam("g_sequence"),
            *(jobs.c[name] == bindparam(f"g_{name}") for name in first.guard),
        )
        .values(
            lifecycle_status=bindparam("v_state"),
            sequence=bindparam("v_sequence"),
            **expressions,
            **{name: bindparam(f"v_{name}") for name in plain},
        )
    )
    parameters = [
        {
            "g_job_id": change.job_id,
            "g_state": change.from_state,
            "g_sequence": change.sequence - 1,
            "v_state": change.to_state,
            "v_sequence": change.sequence,
            **{f"g_{name}": value for name, value in change.guard.items()},
            **{f"v_{name}": change.values[name] for name in plain},
        }
        for change in changes
    ]
    result = await tx.execute(statement, parameters)
    if result.rowcount != len(changes):
        raise StaleChange(f"{result.rowcount} of {len(changes)} rows were as expected")


def _entry(change: Change) -> dict[str, Any]:
    return {
        "job_id": change.job_id,
        "sequence": change.sequence,
        "kind": change.kind,
        "from_state": change.from_state,
        "to_state": change.to_state,
        "attempt": change.attempt,
        "actor": change.actor,
        "reason": change.reason,
        "lease_token": change.lease_token,
        "execution": change.execution,
        "feedback": change.feedback,
        "internal": change.internal,
    }
