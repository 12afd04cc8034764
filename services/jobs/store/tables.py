"""The tables of the jobs service. CHECK and UNIQUE constraints repeat the invariants of the code.

Ids and keys are printable ASCII (validated where they come in) in `ascii_bin` columns, because MySQL's default
collations take "A" and "a" for one key (ruling 15). Everything that is hashed is stored as the text that was hashed.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR
from sqlalchemy.types import TypeEngine

from services.jobs.store.time import UtcTime

MYSQL = ("mysql", "mariadb")


def ascii_text(length: int) -> TypeEngine[str]:
    """Text of printable ASCII, compared byte by byte."""
    return String(length).with_variant(VARCHAR(length, charset="ascii", collation="ascii_bin"), *MYSQL)


def long_text() -> TypeEngine[str]:
    """Any Unicode text, kept byte for byte."""
    return Text().with_variant(LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), *MYSQL)


def job_id_column(**arguments: Any) -> Column[str]:
    """Reference a job. No foreign key on hot tables: it would take a shared lock on the parent row."""
    return Column("job_id", ascii_text(36), nullable=False, **arguments)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
MYSQL_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in MYSQL
    for option, value in (("engine", "InnoDB"), ("row_format", "DYNAMIC"), ("charset", "utf8mb4"))
}

LEGACY_STATUS = (
    "CASE lifecycle_status WHEN 'queued' THEN 'pending' WHEN 'running' THEN 'processing'"
    " WHEN 'succeeded' THEN 'completed' ELSE lifecycle_status END"
)

users = Table(
    "users",
    metadata,
    Column("user_id", ascii_text(128), primary_key=True),
    Column("created_at", UtcTime, nullable=False),
    comment="Locked first by every create, so that what is counted per user is exact.",
    **MYSQL_OPTIONS,
)

user_quota_counters = Table(
    "user_quota_counters",
    metadata,
    Column("user_id", ascii_text(128), primary_key=True),
    Column("job_type", ascii_text(64), primary_key=True),
    Column("period", ascii_text(10), primary_key=True),
    Column("created", Integer, nullable=False),
    comment="Jobs created per UTC day (2026-11-30) and month (2026-11); job_type empty: of all types.",
    **MYSQL_OPTIONS,
)

platform_switch = Table(
    "platform_switch",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("available", Boolean, nullable=False),
    Column("reason", String(256), nullable=False),
    Column("changed_by", ascii_text(128), nullable=False),
    Column("changed_at", UtcTime, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    comment="Whether jobs can be created. No row: they can.",
    **MYSQL_OPTIONS,
)

queues = Table(
    "queues",
    metadata,
    Column("queue", ascii_text(64), primary_key=True),
    Column("paused_at", UtcTime, nullable=True),
    Column("paused_by", ascii_text(128), nullable=False),
    Column("reason", String(256), nullable=False),
    Column("ready", Integer, nullable=True),
    Column("ready_at", UtcTime, nullable=True),
    Column("ready_before", Integer, nullable=True),
    Column("ready_before_at", UtcTime, nullable=True),
    CheckConstraint("(ready IS NULL) = (ready_at IS NULL)", name="ready_has_time"),
    CheckConstraint("(ready_before IS NULL) = (ready_before_at IS NULL)", name="ready_before_has_time"),
    comment="A queue without a row is not paused.",
    **MYSQL_OPTIONS,
)

executors = Table(
    "executors",
    metadata,
    Column("executor_id", ascii_text(128), primary_key=True),
    Column("session_epoch", BigInteger, nullable=False),
    Column("hello_no", BigInteger, nullable=False),
    Column("version", ascii_text(64), nullable=False),
    Column("job_types_json", long_text(), nullable=False),
    Column("queues_json", long_text(), nullable=False),
    Column("first_seen_at", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("reported_at", UtcTime, nullable=False),
    Column("disconnected_at", UtcTime, nullable=True),
    Column("lost_at", UtcTime, nullable=True),
    Column("drain_requested_at", UtcTime, nullable=True),
    CheckConstraint("lost_at IS NULL OR disconnected_at IS NOT NULL", name="lost_was_disconnected"),
    Index(None, "seen_at"),
    comment="One row per executor process. Locked before the jobs that it holds.",
    **MYSQL_OPTIONS,
)

dispatchers = Table(
    "dispatchers",
    metadata,
    Column("dispatcher_id", ascii_text(128), primary_key=True),
    Column("event_types_json", long_text(), nullable=False),
    Column("first_seen_at", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Index(None, "seen_at"),
    comment="One row per dispatcher process. Its claims end when it is not seen any more.",
    **MYSQL_OPTIONS,
)

virtual_times = Table(
    "virtual_times",
    metadata,
    Column("user_id", ascii_text(128), primary_key=True),
    Column("queue", ascii_text(64), primary_key=True),
    Column("priority", SmallInteger, primary_key=True, autoincrement=False),
    Column("virtual_at", UtcTime, nullable=False),
    Index(None, "virtual_at"),
    comment="Where the next job of a user takes its place in the order of a queue. One in the past says nothing.",
    **MYSQL_OPTIONS,
)

jobs = Table(
    "jobs",
    metadata,
    job_id_column(primary_key=True),
    Column("job_type", ascii_text(64), nullable=False),
    Column("user_id", ascii_text(128), nullable=False),
    Column("target_type", ascii_text(128), nullable=False),
    Column("target_id", ascii_text(128), nullable=False),
    Column("lifecycle_status", ascii_text(16), nullable=False),
    Column("queue", ascii_text(64), nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("progress", SmallInteger, nullable=False),
    Column("labels_json", long_text(), nullable=False),
    Column("idempotency_key", ascii_text(128), nullable=True),
    Column("request_fingerprint", ascii_text(64), nullable=False),
    Column("definition_version", ascii_text(32), nullable=False),
    Column("cancellable", Boolean, nullable=False),
    Column("max_retries", Integer, nullable=False),
    Column("backoff_ms", Integer, nullable=False),
    Column("abort_strategy", ascii_text(8), nullable=False),
    Column("run_timeout_ms", BigInteger, nullable=True),
    Column("retry_count", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("dispatch_no", Integer, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("lease_token", ascii_text(64), nullable=True),
    Column("locked_by", ascii_text(128), nullable=True),
    Column("locked_at", UtcTime, nullable=True),
    Column("lock_until", UtcTime, nullable=True),
    Column("lapsed_at", UtcTime, nullable=True),
    Column("takeover_count", Integer, nullable=False, server_default="0"),
    Column("cancel_requested_at", UtcTime, nullable=True),
    Column("run_at", UtcTime, nullable=True),
    Column("due_at", UtcTime, nullable=True),
    Column("rank_at", UtcTime, nullable=True),
    Column("retry_of", ascii_text(36), nullable=True),
    Column("root_job_id", ascii_text(36), nullable=True),
    Column("parent_job_id", ascii_text(36), nullable=True),
    Column("depth", SmallInteger, nullable=False, server_default="0"),
    Column("trace_context", ascii_text(512), nullable=True),
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime, nullable=True),
    Column("finished_at", UtcTime, nullable=True),
    Column("error_code", ascii_text(64), nullable=True),
    Column("error_public", String(512), nullable=True),
    Column("error_internal", long_text(), nullable=True),
    Column("artifact_count", Integer, nullable=False),
    Column("output_hash", ascii_text(64), nullable=True),
    Column("output_json", long_text(), nullable=True),
    # What clients of the old application read (LC-12). Made by the database, so that it cannot drift.
    Column("legacy_status", ascii_text(16), Computed(LEGACY_STATUS, persisted=False)),
    UniqueConstraint("user_id", "job_type", "idempotency_key"),
    CheckConstraint("lifecycle_status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="state"),
    CheckConstraint(
        "(lifecycle_status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
        name="terminal_is_finished",
    ),
    CheckConstraint(
        "(lifecycle_status = 'running') = (lease_token IS NOT NULL OR lapsed_at IS NOT NULL)", name="running_is_leased"
    ),
    CheckConstraint(
        "lapsed_at IS NULL OR (lease_token IS NULL AND cancel_requested_at IS NULL)", name="lapsed_has_no_lease"
    ),
    CheckConstraint("(lease_token IS NULL) = (lock_until IS NULL)", name="lease_has_end"),
    CheckConstraint("(lifecycle_status = 'failed') = (error_code IS NOT NULL)", name="failed_has_error"),
    CheckConstraint("(lifecycle_status = 'succeeded') = (output_hash IS NOT NULL)", name="succeeded_has_output"),
    CheckConstraint("lifecycle_status <> 'queued' OR cancel_requested_at IS NULL", name="queued_cancels_at_once"),
    CheckConstraint("abort_strategy IN ('fail', 'retry')", name="abort_strategy"),
    CheckConstraint("priority BETWEEN 0 AND 100", name="priority"),
    CheckConstraint("progress BETWEEN 0 AND 100", name="progress"),
    Index(None, "user_id", "job_id"),
    Index(None, "job_type", "job_id"),
    Index(None, "queue", "job_id"),
    Index(None, "user_id", "lifecycle_status", "job_id"),
    Index(None, "lifecycle_status", "job_id"),
    # Only leased jobs have the first and the last, only lapsed ones the second: small, however many jobs there are.
    Index(None, "lock_until"),
    Index(None, "lapsed_at", "job_id"),
    Index(None, "locked_by"),
    Index(None, "retry_of"),
    Index(None, "parent_job_id"),
    Index(None, "job_type", "lifecycle_status", "finished_at"),
    **MYSQL_OPTIONS,
)

job_snapshots = Table(
    "job_snapshots",
    metadata,
    Column("job_id", ascii_text(36), ForeignKey("jobs.job_id"), primary_key=True),
    Column("schema_version", ascii_text(64), nullable=False),
    Column("content_json", long_text(), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Index(None, "created_at"),
    comment="What a job works on, frozen when it was created.",
    **MYSQL_OPTIONS,
)

job_artifacts = Table(
    "job_artifacts",
    metadata,
    Column("job_id", ascii_text(36), ForeignKey("jobs.job_id"), primary_key=True),
    Column("artifact_type", ascii_text(64), primary_key=True),
    Column("artifact_id", ascii_text(128), primary_key=True),
    Column("ordinal", Integer, nullable=False),
    Column("content_json", long_text(), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    UniqueConstraint("job_id", "artifact_type", "ordinal"),
    **MYSQL_OPTIONS,
)

job_history = Table(
    "job_history",
    metadata,
    job_id_column(primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", ascii_text(32), nullable=False),
    Column("from_state", ascii_text(16), nullable=True),
    Column("to_state", ascii_text(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("actor", ascii_text(160), nullable=False),
    Column("reason", String(256), nullable=False),
    Column("lease_token", ascii_text(64), nullable=True),
    Column("execution", Integer, nullable=True),
    Column("feedback", long_text(), nullable=True),
    Column("internal", long_text(), nullable=True),
    Column("at", UtcTime, nullable=False),
    comment="Append-only. Also how a repeated report finds the answer that it got the first time (ruling 33).",
    **MYSQL_OPTIONS,
)

requests = Table(
    "requests",
    metadata,
    Column("caller", ascii_text(128), primary_key=True),
    Column("user_id", ascii_text(128), primary_key=True),
    Column("method", ascii_text(32), primary_key=True),
    Column("request_id", ascii_text(128), primary_key=True),
    Column("fingerprint", ascii_text(64), nullable=False),
    job_id_column(),
    Column("answer_json", long_text(), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Index(None, "job_id"),
    comment="Answers already given, so that a repeat after a lost answer has one effect. Refusals are not kept.",
    **MYSQL_OPTIONS,
)

outbox_events = Table(
    "outbox_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("event_id", ascii_text(36), nullable=False, unique=True),
    Column("event_type", ascii_text(64), nullable=False),
    Column("aggregate_type", ascii_text(32), nullable=False),
    Column("aggregate_id", ascii_text(36), nullable=False),
    Column("dedupe_key", ascii_text(160), nullable=False, unique=True),
    Column("payload_json", long_text(), nullable=False),
    Column("queue", ascii_text(64), nullable=False, server_default=""),
    Column("status", ascii_text(16), nullable=False),
    Column("attempt_count", Integer, nullable=False),
    Column("available_at", UtcTime, nullable=True),
    Column("rank_at", UtcTime, nullable=True),
    Column("claim_token", ascii_text(64), nullable=True),
    Column("locked_by", ascii_text(128), nullable=True),
    Column("claim_until", UtcTime, nullable=True),
    Column("created_at", UtcTime, nullable=False),
    Column("settled_at", UtcTime, nullable=True),
    Column("last_error", ascii_text(64), nullable=True),
    Column("trace_context", ascii_text(512), nullable=True),
    CheckConstraint(
        "status IN ('scheduled', 'pending', 'processing', 'published', 'dead', 'discarded')", name="status"
    ),
    CheckConstraint("(status = 'processing') = (claim_until IS NOT NULL)", name="processing_is_claimed"),
    CheckConstraint("(status = 'scheduled') = (available_at IS NOT NULL)", name="scheduled_has_time"),
    CheckConstraint("status <> 'pending' OR rank_at IS NOT NULL", name="pending_is_ranked"),
    CheckConstraint(
        "(status IN ('published', 'dead', 'discarded')) = (settled_at IS NOT NULL)", name="settled_has_time"
    ),
    Index(None, "status", "queue", "event_type", "rank_at", "id"),
    # Only scheduled events have the first, only settled ones the second.
    Index(None, "available_at"),
    Index(None, "settled_at"),
    Index(None, "status", "claim_until"),
    Index(None, "claim_token"),
    Index(None, "aggregate_id"),
    **MYSQL_OPTIONS,
)

model_invocations = Table(
    "model_invocations",
    metadata,
    job_id_column(primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("call_no", Integer, primary_key=True, autoincrement=False),
    Column("user_id", ascii_text(128), nullable=False),
    Column("job_type", ascii_text(64), nullable=False),
    Column("provider", ascii_text(64), nullable=False),
    Column("model", ascii_text(128), nullable=False),
    Column("tier", ascii_text(32), nullable=False),
    Column("prompt_key", ascii_text(128), nullable=False),
    Column("prompt_version", ascii_text(32), nullable=False),
    Column("credential_mode", ascii_text(32), nullable=False),
    Column("late", Boolean, nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("settled_at", UtcTime, nullable=True),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("token_source", ascii_text(16), nullable=False),
    Column("latency_us", BigInteger, nullable=False),
    Column("error_code", ascii_text(64), nullable=False),
    Index(None, "user_id", "opened_at"),
    comment="The usage ledger: one row per model call. No settled_at: what became of the call is unknown.",
    **MYSQL_OPTIONS,
)
