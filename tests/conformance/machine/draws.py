"""What the machine draws, and what the drawn words mean."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from hypothesis import strategies as st

from services.jobs.execution import Cancelled, Released
from services.jobs.lifecycle import Lease
from services.jobs.outbox import Published, PublishFailed
from services.jobs.outbox import Released as EventReleased
from services.jobs.store.contents import ArtifactRow
from tests.conformance.conftest import failure, success
from tests.conformance.machine.holders import FINAL, RETRYABLE, Report
from tests.conformance.machine.upkeep import Result

T = TypeVar("T")

#: Which of many, counted from the newest.
PICK = st.integers(0, 9)
#: A few request ids that are used again, by accident or by a repeat, besides new ones.
REQUEST_ID = st.sampled_from(["", "", "request-1", "request-2"])
EXECUTOR = st.sampled_from(["executor-1", "executor-1", "executor-2", "executor-3"])
#: What somebody else does meanwhile, and to which of many.
MEANWHILE = st.tuples(
    st.sampled_from(["", "", "heartbeat", "heartbeat", "success", "cancel", "lock", "reap", "sweep", "hello"]),
    st.integers(0, 9),
)
REPORT = st.sampled_from(
    ["retryable", "success", "artifacts", "final", "cancelled", "released", "delayed", "success", "retryable"]
)
RESULTS = st.lists(st.sampled_from(["published", "published", "failed", "released"]), min_size=3, max_size=3)
#: Whether to choose something that the call is meant for.
FIT = st.sampled_from([True, True, False])
DISPATCH = st.sampled_from(["claim", "publish", "publish", "settle", "late"])
LIMIT = st.sampled_from([1, 5])
IDLE = st.sampled_from([True, True, False])
NEW_JOB = st.fixed_dictionaries(
    {
        "user_id": st.sampled_from(["user-1", "user-1", "user-2"]),
        "job_type": st.sampled_from(["testing", "testing", "fixed"]),
        "input": st.sampled_from([{"number": 0}, {"number": 1}]),
        "idempotency_key": st.sampled_from([None, None, "key-1", "key-2"]),
        "strict_idempotency": st.booleans(),
    }
)
DELAY = st.sampled_from([None, None, None, 30, 7200])
SPAN = st.sampled_from([1, 6, 11, 31, 61, 95, 3600])


def some(many: Sequence[T], pick: int) -> T:
    """Choose one, counted from the newest."""
    return many[-1 - pick % len(many)]


def report_of(lease: Lease, word: str, execution: int) -> Report:
    reports: dict[str, Report] = {
        "success": success(),
        "artifacts": success({"text": lease.lease_token}, artifacts=_artifacts(lease)),
        "retryable": failure(RETRYABLE, execution),
        "final": failure(FINAL, execution),
        "cancelled": Cancelled(),
        "released": Released(reason="drained"),
        "delayed": Released(reason="Retry-After", delay=timedelta(seconds=30)),
    }
    return reports[word]


def result_of(word: str) -> Result:
    match word:
        case "published":
            return Published()
        case "failed":
            return PublishFailed(reason="DISPATCH_FAILED", retryable=True)
        case _:
            return EventReleased()


def _artifacts(lease: Lease) -> list[ArtifactRow]:
    return [
        ArtifactRow(
            job_id=lease.job_id,
            artifact_type="note",
            artifact_id=f"{lease.lease_token}-{number}",
            ordinal=number,
            content_json="{}",
        )
        for number in range(2)
    ]
