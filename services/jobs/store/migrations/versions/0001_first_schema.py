"""The first schema: jobs with their snapshots, artifacts and history, outbox, requests, usage ledger.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR

from services.jobs.store.migrations.steps import create_index, create_table
from services.jobs.store.time import UtcTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Frozen here: the tables of the code go on without this migration.
MYSQL = ("mysql", "mariadb")
MYSQL_OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in MYSQL
    for option, value in (("engine", "InnoDB"), ("row_format", "DYNAMIC"), ("charset", "utf8mb4"))
}


def ascii_text(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(VARCHAR(length, charset="ascii", collation="ascii_bin"), *MYSQL)


def long_text() -> sa.types.TypeEngine[str]:
    return sa.Text().with_variant(LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), *MYSQL)


def upgrade() -> None:
    create_table(
        "job_history",
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", ascii_text(32), nullable=False),
        sa.Column("from_state", ascii_text(16), nullable=True),
        sa.Column("to_state", ascii_text(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("actor", ascii_text(160), nullable=False),
        sa.Column("reason", sa.String(length=256), nullable=False),
        sa.Column("lease_token", ascii_text(64), nullable=True),
        sa.Column("execution", sa.Integer(), nullable=True),
        sa.Column("feedback", long_text(), nullable=True),
        sa.Column("internal", long_text(), nullable=True),
        sa.Column("at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "sequence", name=op.f("pk_job_history")),
        comment="Append-only. Also how a repeated report finds the answer that it got the first time (ruling 33).",
        **MYSQL_OPTIONS,
    )
    create_table(
        "jobs",
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("job_type", ascii_text(64), nullable=False),
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("target_type", ascii_text(128), nullable=False),
        sa.Column("target_id", ascii_text(128), nullable=False),
        sa.Column("lifecycle_status", ascii_text(16), nullable=False),
        sa.Column("queue", ascii_text(64), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("progress", sa.SmallInteger(), nullable=False),
        sa.Column("labels_json", long_text(), nullable=False),
        sa.Column("idempotency_key", ascii_text(128), nullable=True),
        sa.Column("request_fingerprint", ascii_text(64), nullable=False),
        sa.Column("definition_version", ascii_text(32), nullable=False),
        sa.Column("cancellable", sa.Boolean(), nullable=False),
        sa.Column("max_retries", sa.Integer(), nullable=False),
        sa.Column("backoff_ms", sa.Integer(), nullable=False),
        sa.Column("abort_strategy", ascii_text(8), nullable=False),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("dispatch_no", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("lease_token", ascii_text(64), nullable=True),
        sa.Column("locked_by", ascii_text(128), nullable=True),
        sa.Column("locked_at", UtcTime(), nullable=True),
        sa.Column("lock_until", UtcTime(), nullable=True),
        sa.Column("cancel_requested_at", UtcTime(), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("started_at", UtcTime(), nullable=True),
        sa.Column("finished_at", UtcTime(), nullable=True),
        sa.Column("error_code", ascii_text(64), nullable=True),
        sa.Column("error_public", sa.String(length=512), nullable=True),
        sa.Column("error_internal", long_text(), nullable=True),
        sa.Column("artifact_count", sa.Integer(), nullable=False),
        sa.Column("output_hash", ascii_text(64), nullable=True),
        sa.Column("output_json", long_text(), nullable=True),
        sa.CheckConstraint(
            "(lifecycle_status = 'failed') = (error_code IS NOT NULL)", name=op.f("ck_jobs_failed_has_error")
        ),
        sa.CheckConstraint(
            "(lifecycle_status = 'running') = (lease_token IS NOT NULL)", name=op.f("ck_jobs_running_is_leased")
        ),
        sa.CheckConstraint(
            "(lifecycle_status = 'succeeded') = (output_hash IS NOT NULL)", name=op.f("ck_jobs_succeeded_has_output")
        ),
        sa.CheckConstraint(
            "(lifecycle_status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
            name=op.f("ck_jobs_terminal_is_finished"),
        ),
        sa.CheckConstraint(
            "lifecycle_status <> 'queued' OR cancel_requested_at IS NULL", name=op.f("ck_jobs_queued_cancels_at_once")
        ),
        sa.CheckConstraint(
            "lifecycle_status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name=op.f("ck_jobs_state")
        ),
        sa.CheckConstraint("(lease_token IS NULL) = (lock_until IS NULL)", name=op.f("ck_jobs_lease_has_end")),
        sa.CheckConstraint("abort_strategy IN ('fail', 'retry')", name=op.f("ck_jobs_abort_strategy")),
        sa.CheckConstraint("priority BETWEEN 0 AND 100", name=op.f("ck_jobs_priority")),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name=op.f("ck_jobs_progress")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
        sa.UniqueConstraint(
            "user_id", "job_type", "idempotency_key", name=op.f("uq_jobs_user_id_job_type_idempotency_key")
        ),
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_jobs_lifecycle_status_job_id"), "jobs", ["lifecycle_status", "job_id"], unique=False)
    create_index(op.f("ix_jobs_lifecycle_status_lock_until"), "jobs", ["lifecycle_status", "lock_until"], unique=False)
    create_index(
        op.f("ix_jobs_user_id_lifecycle_status_job_id"), "jobs", ["user_id", "lifecycle_status", "job_id"], unique=False
    )
    create_table(
        "model_invocations",
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("call_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("job_type", ascii_text(64), nullable=False),
        sa.Column("provider", ascii_text(64), nullable=False),
        sa.Column("model", ascii_text(128), nullable=False),
        sa.Column("tier", ascii_text(32), nullable=False),
        sa.Column("prompt_key", ascii_text(128), nullable=False),
        sa.Column("prompt_version", ascii_text(32), nullable=False),
        sa.Column("credential_mode", ascii_text(32), nullable=False),
        sa.Column("late", sa.Boolean(), nullable=False),
        sa.Column("opened_at", UtcTime(), nullable=False),
        sa.Column("settled_at", UtcTime(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("token_source", ascii_text(16), nullable=False),
        sa.Column("latency_us", sa.BigInteger(), nullable=False),
        sa.Column("error_code", ascii_text(64), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "call_no", name=op.f("pk_model_invocations")),
        comment="The usage ledger: one row per model call. No settled_at: what became of the call is unknown.",
        **MYSQL_OPTIONS,
    )
    create_index(
        op.f("ix_model_invocations_user_id_opened_at"), "model_invocations", ["user_id", "opened_at"], unique=False
    )
    create_table(
        "outbox_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("event_id", ascii_text(36), nullable=False),
        sa.Column("event_type", ascii_text(64), nullable=False),
        sa.Column("aggregate_type", ascii_text(32), nullable=False),
        sa.Column("aggregate_id", ascii_text(36), nullable=False),
        sa.Column("dedupe_key", ascii_text(160), nullable=False),
        sa.Column("payload_json", long_text(), nullable=False),
        sa.Column("status", ascii_text(16), nullable=False),
        sa.Column("attempt_count", sa.Integer(), nullable=False),
        sa.Column("available_at", UtcTime(), nullable=False),
        sa.Column("claim_token", ascii_text(64), nullable=True),
        sa.Column("locked_by", ascii_text(128), nullable=True),
        sa.Column("claim_until", UtcTime(), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("published_at", UtcTime(), nullable=True),
        sa.Column("last_error", ascii_text(64), nullable=True),
        sa.Column("trace_context", ascii_text(512), nullable=True),
        sa.CheckConstraint(
            "(status = 'processing') = (claim_until IS NOT NULL)", name=op.f("ck_outbox_events_processing_is_claimed")
        ),
        sa.CheckConstraint(
            "(status = 'published') = (published_at IS NOT NULL)", name=op.f("ck_outbox_events_published_has_time")
        ),
        sa.CheckConstraint(
            "status IN ('scheduled', 'pending', 'processing', 'published', 'dead', 'discarded')",
            name=op.f("ck_outbox_events_status"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox_events")),
        sa.UniqueConstraint("dedupe_key", name=op.f("uq_outbox_events_dedupe_key")),
        sa.UniqueConstraint("event_id", name=op.f("uq_outbox_events_event_id")),
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_outbox_events_aggregate_id"), "outbox_events", ["aggregate_id"], unique=False)
    create_index(op.f("ix_outbox_events_claim_token"), "outbox_events", ["claim_token"], unique=False)
    create_index(
        op.f("ix_outbox_events_status_available_at_id"), "outbox_events", ["status", "available_at", "id"], unique=False
    )
    create_index(op.f("ix_outbox_events_status_claim_until"), "outbox_events", ["status", "claim_until"], unique=False)
    create_table(
        "requests",
        sa.Column("caller", ascii_text(128), nullable=False),
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("method", ascii_text(32), nullable=False),
        sa.Column("request_id", ascii_text(128), nullable=False),
        sa.Column("fingerprint", ascii_text(64), nullable=False),
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("answer_json", long_text(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("caller", "user_id", "method", "request_id", name=op.f("pk_requests")),
        comment="Answers already given, so that a repeat after a lost answer has one effect. Refusals are not kept.",
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_requests_created_at"), "requests", ["created_at"], unique=False)
    create_table(
        "users",
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_users")),
        comment="Locked first by every create, so that what is counted per user is exact.",
        **MYSQL_OPTIONS,
    )
    create_table(
        "job_artifacts",
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("artifact_type", ascii_text(64), nullable=False),
        sa.Column("artifact_id", ascii_text(128), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("content_json", long_text(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_job_artifacts_jobs")),
        sa.PrimaryKeyConstraint("job_id", "artifact_type", "artifact_id", name=op.f("pk_job_artifacts")),
        sa.UniqueConstraint(
            "job_id", "artifact_type", "ordinal", name=op.f("uq_job_artifacts_job_id_artifact_type_ordinal")
        ),
        **MYSQL_OPTIONS,
    )
    create_table(
        "job_snapshots",
        sa.Column("job_id", ascii_text(36), nullable=False),
        sa.Column("schema_version", ascii_text(64), nullable=False),
        sa.Column("content_json", long_text(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_job_snapshots_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_snapshots")),
        comment="What a job works on, frozen when it was created.",
        **MYSQL_OPTIONS,
    )
