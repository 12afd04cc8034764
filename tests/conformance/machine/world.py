"""What the tables hold at one moment, and what must be true of it whatever was called before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from sqlalchemy import Select, Table, create_engine, make_url, select

from aijobs.states import LEGAL_CHANGES, JobState
from services.jobs.events import END_EVENTS, dispatch_key
from services.jobs.lifecycle import Lease
from services.jobs.store.tables import (
    executors,
    job_artifacts,
    job_history,
    jobs,
    metadata,
    outbox_events,
    queues,
    requests,
)

Row = Mapping[str, Any]

LIVE_LIMIT = 2
MOST_TAKEOVERS = 1
LEGACY = {
    "queued": "pending",
    "running": "processing",
    "succeeded": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}
#: What a heartbeat writes: no step of the job's sequence.
BEAT = {"lock_until", "progress"}
#: What is read, and in what order.
ORDERS = {
    jobs: ["job_id"],
    job_history: ["job_id", "sequence"],
    job_artifacts: ["job_id", "artifact_type", "ordinal"],
    outbox_events: ["id"],
    requests: ["caller", "user_id", "method", "request_id"],
    executors: ["executor_id"],
    queues: ["queue"],
}
DISPATCHES = {"created", "retried", "lapsed", "handed_back", "dispatched_again"}


@dataclass(frozen=True)
class World:
    """The rows of all tables. Two worlds are equal when nothing but the executors' signs of life differs."""

    jobs: Mapping[str, Row]
    history: Mapping[str, Sequence[Row]]
    artifacts: Mapping[str, Sequence[Row]]
    events: Mapping[str, Row]
    requests: Sequence[Row]
    executors: Mapping[str, Row]
    paused: frozenset[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and all(
            getattr(self, name) == getattr(other, name)
            for name in ("jobs", "history", "artifacts", "events", "requests")
        )

    __hash__ = None  # type: ignore[assignment] # compared, never a key

    def tokens(self, job_id: str, *kinds: str) -> set[str]:
        """Return the tokens of a job's history entries of these kinds."""
        return {row["lease_token"] for row in self.history[job_id] if row["kind"] in kinds}

    @cached_property
    def waiting(self) -> Sequence[str]:
        """The jobs that wait for a lock."""
        return [job_id for job_id, job in self.jobs.items() if waits(job)]

    def live(self, user_id: str) -> int:
        """Count the jobs of a user that have not ended."""
        return sum(job["user_id"] == user_id and not ended(job) for job in self.jobs.values())

    def held_by(self, lease: Lease) -> bool:
        """Tell whether a lease is the present one of its job."""
        job = self.jobs[lease.job_id]
        fence = (job["lifecycle_status"], job["lapsed_at"], job["attempt"], job["lease_token"])
        return fence == (JobState.RUNNING, None, lease.attempt, lease.lease_token)

    def dispatch(self, job_id: str) -> Row:
        """Return the enqueue event of a job under its present dispatch number."""
        return self.events[dispatch_key(job_id, self.jobs[job_id]["dispatch_no"])]

    def news(self, earlier: "World") -> dict[str, list[str]]:
        """Return the kinds of the history entries that are new since then, by job; jobs without any are missing."""
        found = {
            id_: [entry["kind"] for entry in entries[len(earlier.history.get(id_, ())) :]]
            for id_, entries in self.history.items()
        }
        return {job_id: kinds for job_id, kinds in found.items() if kinds}


class Reader:
    """Reads and empties the tables beside the services, over a connection of its own that needs no event loop."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self._sqlite = parsed.get_backend_name() == "sqlite"
        driver = "sqlite" if self._sqlite else "mysql+pymysql"
        self._engine = create_engine(parsed.set(drivername=driver), isolation_level="AUTOCOMMIT")
        self._connection = self._engine.connect()
        self._statements = {table: _select(table, *order) for table, order in ORDERS.items()}

    def read(self) -> World:
        """Read everything that the use cases write about jobs."""
        return World(
            jobs={row["job_id"]: row for row in self._rows(jobs)},
            history=_by_job(self._rows(job_history)),
            artifacts=_by_job(self._rows(job_artifacts)),
            events={row["dedupe_key"]: row for row in self._rows(outbox_events)},
            requests=self._rows(requests),
            executors={row["executor_id"]: row for row in self._rows(executors)},
            paused=frozenset(row["queue"] for row in self._rows(queues) if row["paused_at"] is not None),
        )

    def empty(self) -> None:
        """Empty every table."""
        for table in reversed(metadata.sorted_tables):
            self._connection.execute(table.delete())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._engine.dispose()

    def _rows(self, table: Table) -> list[Row]:
        return [dict(row) for row in self._connection.execute(self._statements[table]).mappings()]


def _select(table: Table, *order: str) -> Select[Any]:
    return select(table).order_by(*(table.c[name] for name in order))


def _by_job(rows: Sequence[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row["job_id"], []).append(row)
    return grouped


def ended(job: Row) -> bool:
    return JobState(job["lifecycle_status"]).terminal


def waits(job: Row) -> bool:
    return job["lifecycle_status"] == JobState.QUEUED or job["lapsed_at"] is not None


def leased(job: Row) -> bool:
    return job["lifecycle_status"] == JobState.RUNNING and job["lapsed_at"] is None


def due(job: Row, now: datetime) -> bool:
    return job["due_at"] is None or job["due_at"] <= now


def check(world: World) -> None:
    """Check what must hold at every moment."""
    for job_id, job in world.jobs.items():
        history = world.history[job_id]
        _check_history(job, history)
        _check_counts(job, [entry["kind"] for entry in history])
        _check_events(world, job)
        artifacts = world.artifacts.get(job_id, ())
        assert len(artifacts) == job["artifact_count"]
        assert not artifacts or job["lifecycle_status"] == JobState.SUCCEEDED, "artifacts without a success"
        assert job["legacy_status"] == LEGACY[job["lifecycle_status"]]
        assert leased(job) == (job["lease_token"] is not None) == (job["locked_by"] is not None)
    for user_id in {job["user_id"] for job in world.jobs.values()}:
        made = [job for job in world.jobs.values() if job["user_id"] == user_id and job["retry_of"] is None]
        assert sum(not ended(job) for job in made) <= LIVE_LIMIT, f"{user_id} has more live jobs than it may have"


def _check_history(job: Row, history: Sequence[Row]) -> None:
    """The entries are numbered without a gap, each begins where the one before ended, and the last is the row."""
    assert [entry["sequence"] for entry in history] == list(range(1, job["sequence"] + 1))
    assert (history[0]["from_state"], history[0]["to_state"]) == (None, JobState.QUEUED)
    for before, entry in pairwise(history):
        change = JobState(entry["from_state"]), JobState(entry["to_state"])
        assert change[0] == before["to_state"]
        assert not change[0].terminal, f"{entry['kind']} after the end"
        assert change in LEGAL_CHANGES or change[0] == change[1], f"no change {change}"
    assert (history[-1]["to_state"], history[-1]["attempt"]) == (job["lifecycle_status"], job["attempt"])
    if any(entry["kind"] == "cancel_requested" for entry in history):
        assert job["lifecycle_status"] in (JobState.RUNNING, JobState.CANCELLED), "a cancel was acknowledged"
    locks = [entry["attempt"] for entry in history if entry["kind"] in ("locked", "taken_over")]
    assert locks == list(range(1, job["attempt"] + 1)), "every lock is one attempt more"


def _check_counts(job: Row, kinds: Sequence[str]) -> None:
    """Every count is the number of the entries that it counts."""
    assert job["takeover_count"] == kinds.count("lapsed") <= MOST_TAKEOVERS
    failures = kinds.count("execution_failed")
    assert failures <= job["max_retries"]
    by_executor = job["error_code"] not in (None, "INTERNAL_LEASE_EXPIRED")
    assert job["retry_count"] == failures + by_executor
    assert job["dispatch_no"] == sum(kind in DISPATCHES for kind in kinds)


def _check_events(world: World, job: Row) -> None:
    """Every dispatch has its event, the present one can still lead to a lock, and the end is told once."""
    for number in range(1, job["dispatch_no"] + 1):
        assert dispatch_key(job["job_id"], number) in world.events, f"dispatch {number} has no event"
    if waits(job):
        event = world.dispatch(job["job_id"])
        alive = event["status"] in ("scheduled", "pending", "processing", "published")
        assert alive or (event["status"], event["attempt_count"]) == ("dead", 3)
        assert job["rank_at"] is not None or event["status"] == "scheduled", "it has no place among those that are due"
    dispatches = [world.events[dispatch_key(job["job_id"], number)] for number in range(1, job["dispatch_no"] + 1)]
    assert {event["rank_at"] for event in dispatches if event["status"] != "discarded"} <= {None, job["rank_at"]}
    told = [event for event in world.events.values() if event["aggregate_id"] == job["job_id"]]
    ends = [event["event_type"] for event in told if event["event_type"] in list(END_EVENTS.values())]
    assert ends == ([END_EVENTS[JobState(job["lifecycle_status"])]] if ended(job) else [])
    assert len(told) == job["dispatch_no"] + len(ends)


def check_step(before: World, after: World, beating: str | None) -> None:
    """Check what no call may do, whatever it is: change the past, or a job without saying so in its history.

    Args:
        before: the rows before the call.
        after: those after it.
        beating: the job whose heartbeat the call was.

    """
    for job_id, job in before.jobs.items():
        now, past = after.jobs[job_id], before.history[job_id]
        assert after.history[job_id][: len(past)] == past, "history is append-only"
        changed = {name for name in job if job[name] != now[name]}
        assert not (changed and ended(job)), f"{changed} changed after the end"
        told = job["sequence"] != now["sequence"]
        quietly = (BEAT if job_id == beating else set()) | ({"rank_at"} if job["rank_at"] is None else set())
        assert told or changed <= quietly, f"{changed} changed without a word"
        assert now["attempt"] >= job["attempt"]
    for job_id, artifacts in before.artifacts.items():
        assert after.artifacts[job_id] == artifacts
