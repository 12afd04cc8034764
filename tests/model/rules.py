"""The bridge to the rules under test: `services.jobs.lifecycle` decides about rows, as it does in the jobs service.

A row of the model holds those columns of `jobs` that a rule reads or writes, under their own names. To ask a rule, the
row is filled up to a `JobRow`; the `Change` that comes back is written as `store.changes.apply` would write it. What
the database would compute becomes one of three times: a lease or a delay that has ended, now, and one that has not.

Every answer is remembered, so each rule really runs only once for a row.
"""

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement

from aijobs.errors import AijobsError
from aijobs.states import JobState
from services.jobs import events, lifecycle
from services.jobs.events import EventType
from services.jobs.lifecycle import Lease
from services.jobs.store.changes import Change, Kind, StaleChange
from services.jobs.store.jobs import JobRow
from services.jobs.store.time import now

JOB = "job"
MOST_TAKEOVERS = 2
MAX_RETRIES = 1

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPAN = timedelta(minutes=1)
#: An end of a lease that has come, grace and all; and one that has not, as that of a delay.
EARLIER, LATER = NOW - SPAN, NOW + SPAN

#: Columns that rules write and no rule reads, and nothing that must hold depends on.
NOT_MODELLED = frozenset(
    {
        *("progress", "locked_at", "started_at", "output_json", "output_hash", "artifact_count"),
        *("error_code", "error_public", "error_internal"),
    }
)


class Row(NamedTuple):
    """The columns of `jobs` that matter here."""

    lifecycle_status: JobState = JobState.QUEUED
    attempt: int = 0
    lease_token: str | None = None
    locked_by: str | None = None
    lock_until: datetime | None = None
    lapsed_at: datetime | None = None
    takeover_count: int = 0
    retry_count: int = 0
    cancel_requested_at: datetime | None = None
    due_at: datetime | None = None
    finished_at: datetime | None = None
    dispatch_no: int = 1
    sequence: int = 1


class Written(NamedTuple):
    """A row after a change, with what is written beside it."""

    row: Row
    kind: Kind
    event: EventType | None


#: What a rule makes of a row: a change, or the refusal that it raises.
Ruling = Written | type[AijobsError]

_unset: dict[str, Any] = dict.fromkeys(field.name for field in fields(JobRow))
_FIXED = _unset | {
    "job_id": JOB,
    "job_type": "testing",
    "queue": "ai-interactive",
    "priority": 50,
    "cancellable": True,
    "max_retries": MAX_RETRIES,
    "read_at": NOW,
}


@cache
def job(row: Row) -> JobRow:
    """Fill a row up."""
    return JobRow(**(_FIXED | row._asdict()))


def write(row: Row, change: Change) -> Row:
    """Do to a row what `store.changes.apply` does.

    Raises:
        StaleChange: the row is not as the change expects.

    """
    expected = {"lifecycle_status": change.from_state, "sequence": change.sequence - 1, **change.guard}
    if any(getattr(row, column) != value for column, value in expected.items()):
        raise StaleChange(change.kind)
    values = {name: _computed(value) for name, value in change.values.items() if name not in NOT_MODELLED}
    return row._replace(lifecycle_status=change.to_state, sequence=change.sequence, **values)


def _computed(value: Any) -> Any:
    if isinstance(value, now):
        return NOW
    # The only other expression of the rules is now_plus(), and they use it for times to come.
    return LATER if isinstance(value, ColumnElement) else value


def _ruling(row: Row, rule: Callable[[JobRow], Change]) -> Ruling:
    try:
        change = rule(job(row))
    except AijobsError as error:
        return type(error)
    return _written(write(row, change), change.kind)


def _written(after: Row, kind: Kind) -> Written:
    event = events.of(job(after))
    return Written(after, kind, None if event is None else EventType(event.event_type))


@cache
def lock(row: Row, token: str, executor: str) -> Ruling:
    """Ask `lifecycle.lock`."""
    return _ruling(row, lambda job: lifecycle.lock(job, token, executor, SPAN))


@cache
def succeed(row: Row, attempt: int, token: str) -> Ruling:
    """Ask `lifecycle.succeed`."""
    lease = _lease(attempt, token)
    return _ruling(
        row, lambda job: lifecycle.succeed(job, lease, output_json="{}", output_hash="hash", artifact_count=1)
    )


@cache
def fail_execution(row: Row, attempt: int, token: str, execution: int) -> Ruling:
    """Ask `lifecycle.note_execution_failed` or, with the retries used up, `lifecycle.fail`.

    Which of the two is decided as in `JobExecution._may_run_again`, for a code that is always tried again.
    """
    lease, code = _lease(attempt, token), "PROVIDER_TIMEOUT"
    if row.retry_count < MAX_RETRIES:
        return _ruling(
            row,
            lambda job: lifecycle.note_execution_failed(
                job, lease, execution=execution, code=code, internal="", feedback=""
            ),
        )
    return _ruling(row, lambda job: lifecycle.fail(job, lease, execution=execution, code=code, public="", internal=""))


@cache
def cancel_running(row: Row, attempt: int, token: str) -> Ruling:
    """Ask `lifecycle.cancel_running`."""
    return _ruling(row, lambda job: lifecycle.cancel_running(job, _lease(attempt, token)))


@cache
def hand_back(row: Row, attempt: int, token: str, *, delayed: bool) -> Ruling:
    """Ask `lifecycle.hand_back`."""
    delay = SPAN if delayed else timedelta(0)
    return _ruling(row, lambda job: lifecycle.hand_back(job, _lease(attempt, token), reason="drain", delay=delay))


@cache
def cancel_waiting(row: Row) -> Ruling:
    """Ask `lifecycle.cancel_waiting`."""
    return _ruling(row, lambda job: lifecycle.cancel_waiting(job, actor="caller", reason=""))


@cache
def note_cancel_requested(row: Row) -> Ruling:
    """Ask `lifecycle.note_cancel_requested`."""
    return _ruling(row, lambda job: lifecycle.note_cancel_requested(job, actor="caller", reason=""))


@cache
def lapse(row: Row) -> Ruling:
    """Ask `lifecycle.lapse`."""
    return _ruling(row, lambda job: lifecycle.lapse(job, reason="lease expired", most_takeovers=MOST_TAKEOVERS))


@cache
def dispatch_again(row: Row, *, delayed: bool = False) -> Ruling:
    """Ask `lifecycle.dispatch_again`."""
    delay = SPAN if delayed else None
    return _ruling(row, lambda job: lifecycle.dispatch_again(job, reason="message lost", delay=delay))


@cache
def holds(row: Row, attempt: int, token: str) -> bool:
    """Ask `lifecycle.holds`."""
    return lifecycle.holds(job(row), _lease(attempt, token))


def _lease(attempt: int, token: str) -> Lease:
    return Lease(job_id=JOB, attempt=attempt, lease_token=token)
