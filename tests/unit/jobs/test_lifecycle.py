"""LC-1, LC-2, LC-3: the five changes, every pair of states, and nobody else who writes one."""

import ast
import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aijobs.errors import AijobsError, CancelRequested, IllegalTransition, LeaseConflict, LeaseLost
from aijobs.states import LEGAL_CHANGES, TERMINAL_STATES, JobState
from services.jobs import lifecycle
from services.jobs.lifecycle import Lease
from services.jobs.store.changes import Change, Kind
from services.jobs.store.jobs import JobRow

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = Lease(job_id="job-1", attempt=1, lease_token="token")


def row(state: JobState, **changes: object) -> JobRow:
    running = state == JobState.RUNNING
    base = JobRow(
        job_id="job-1",
        job_type="testing",
        user_id="user-1",
        target_type="",
        target_id="",
        lifecycle_status=state,
        queue="ai-interactive",
        priority=50,
        progress=0,
        labels_json="{}",
        idempotency_key=None,
        request_fingerprint="",
        definition_version="1.0.0",
        cancellable=True,
        max_retries=1,
        backoff_ms=1000,
        abort_strategy="fail",
        run_timeout_ms=None,
        retry_count=0,
        attempt=0 if state == JobState.QUEUED else 1,
        dispatch_no=1,
        sequence=1 if state == JobState.QUEUED else 2,
        lease_token="token" if running else None,
        locked_by="executor-1" if running else None,
        lock_until=NOW if running else None,
        lapsed_at=None,
        takeover_count=0,
        run_at=None,
        due_at=None,
        rank_at=None,
        retry_of=None,
        root_job_id=None,
        parent_job_id=None,
        depth=0,
        trace_context=None,
        cancel_requested_at=None,
        created_at=NOW,
        started_at=None,
        finished_at=NOW if state.terminal else None,
        error_code=None,
        error_public=None,
        artifact_count=0,
        output_hash=None,
        read_at=NOW,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def lock(job: JobRow) -> Change:
    return lifecycle.lock(job, "new-token", "executor-2", timedelta(seconds=60))


def succeed(job: JobRow) -> Change:
    return lifecycle.succeed(job, LEASE, output_json="{}", output_hash="h", artifact_count=0)


def fail(job: JobRow) -> Change:
    return lifecycle.fail(job, LEASE, execution=1, code="X", public="p", internal="i")


def cancel_waiting(job: JobRow) -> Change:
    return lifecycle.cancel_waiting(job, actor="a", reason="")


def cancel_running(job: JobRow) -> Change:
    return lifecycle.cancel_running(replace(job, cancel_requested_at=NOW), LEASE)


CHANGES = {
    (JobState.QUEUED, JobState.RUNNING): lock,
    (JobState.RUNNING, JobState.SUCCEEDED): succeed,
    (JobState.RUNNING, JobState.FAILED): fail,
    (JobState.QUEUED, JobState.CANCELLED): cancel_waiting,
    (JobState.RUNNING, JobState.CANCELLED): cancel_running,
}


def test_there_are_exactly_five_changes() -> None:
    assert set(CHANGES) == LEGAL_CHANGES
    assert {state for state in JobState if state.terminal} == TERMINAL_STATES


@pytest.mark.parametrize(("from_state", "to_state"), list(itertools.product(JobState, JobState)))
def test_every_pair_of_states(from_state: JobState, to_state: JobState) -> None:
    """All 25: the legal ones are made by their constructor, the others by none, and cannot be written down."""
    if (from_state, to_state) in LEGAL_CHANGES:
        change = CHANGES[from_state, to_state](row(from_state))
        assert (change.from_state, change.to_state) == (from_state, to_state)
        return
    for make in (make for (begin, end), make in CHANGES.items() if end == to_state and begin != from_state):
        with pytest.raises(AijobsError):
            make(row(from_state))
    if from_state != to_state or from_state.terminal:  # notes: a history entry without a change of state
        with pytest.raises(ValueError, match="no change from"):
            Change(
                job_id="job-1",
                kind=Kind.LOCKED,
                from_state=from_state,
                to_state=to_state,
                sequence=1,
                attempt=1,
                actor="a",
            )


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_the_refusal_names_both_states(state: JobState) -> None:
    with pytest.raises(IllegalTransition, match=f"from {state} to running"):
        lock(row(state))


def test_a_lock_raises_the_fence() -> None:
    change = lock(row(JobState.QUEUED))
    assert (change.attempt, change.values["attempt"], change.values["lease_token"]) == (1, 1, "new-token")
    with pytest.raises(LeaseConflict):
        lock(row(JobState.RUNNING))


def test_started_at_is_set_only_the_first_time() -> None:
    assert "started_at" in lock(row(JobState.QUEUED)).values
    assert "started_at" not in lock(row(JobState.QUEUED, started_at=NOW)).values


@pytest.mark.parametrize("make", [succeed, fail, cancel_running])
@pytest.mark.parametrize("change", [{"attempt": 2}, {"lease_token": "other"}])
def test_a_stale_lease_is_refused(make, change) -> None:
    with pytest.raises(LeaseLost):
        make(row(JobState.RUNNING, **change))


@pytest.mark.parametrize("make", [succeed, fail])
def test_after_a_cancel_request_a_run_ends_only_cancelled(make) -> None:
    job = row(JobState.RUNNING, cancel_requested_at=NOW)
    with pytest.raises(CancelRequested):
        make(job)
    with pytest.raises(CancelRequested):
        lifecycle.note_execution_failed(job, LEASE, execution=1, code="X", internal="", feedback="")
    assert lifecycle.cancel_running(job, LEASE).to_state == JobState.CANCELLED


def test_a_run_that_nobody_cancelled_cannot_end_cancelled() -> None:
    with pytest.raises(IllegalTransition):
        lifecycle.cancel_running(row(JobState.RUNNING), LEASE)


@pytest.mark.parametrize("make", [succeed, fail, cancel_running])
def test_an_end_gives_the_lease_up(make) -> None:
    values = make(row(JobState.RUNNING)).values
    assert {name: values[name] for name in lifecycle.NO_LEASE} == lifecycle.NO_LEASE


def test_every_change_is_one_step_of_the_sequence() -> None:
    for (from_state, _), make in CHANGES.items():
        job = row(from_state)
        assert make(job).sequence == job.sequence + 1


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_only_one_module_writes_the_state() -> None:
    """LC-3. A write names the column as a keyword, as a key or in SQL text; reads use it as an attribute."""
    allowed = {
        "services/jobs/store/changes.py",  # the INSERT and the UPDATE
        "services/jobs/store/tables.py",  # the column itself and its constraints
        "services/jobs/store/jobs.py",  # rebuilds a row that was read
    }
    writers = {
        str(path.relative_to(ROOT))
        for path in python_files("services", "libs")
        if "migrations" not in path.parts and _names_as_value(ast.parse(path.read_text()), "lifecycle_status")
    }
    assert writers <= allowed
    assert "services/jobs/store/changes.py" in writers


def _names_as_value(tree: ast.Module, name: str) -> bool:
    """Tell whether code passes `name` as a keyword or holds it in a text that is no docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return any(
        (isinstance(node, ast.keyword) and node.arg == name)
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and name in node.value
            and id(node) not in docstrings
        )
        for node in ast.walk(tree)
    )


def test_only_the_lifecycle_builds_changes() -> None:
    builders = {
        str(path.relative_to(ROOT))
        for path in python_files("services")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Change"
    }
    assert builders == {"services/jobs/lifecycle.py"}
