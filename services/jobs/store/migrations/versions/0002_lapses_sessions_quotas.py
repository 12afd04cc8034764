"""Lapsing leases, executor sessions, delayed start, manual retry, pauses, quotas, the legacy status.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR

from services.jobs.store.migrations.steps import alter_table, create_index, create_table, drop_index
from services.jobs.store.time import UtcTime

revision = "0002"
down_revision = "0001"
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
    _jobs()
    _outbox_events()
    create_table(
        "user_quota_counters",
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("job_type", ascii_text(64), nullable=False),
        sa.Column("period", ascii_text(10), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "job_type", "period", name=op.f("pk_user_quota_counters")),
        comment="Jobs created per UTC day (2026-11-30) and month (2026-11); job_type empty: of all types.",
        **MYSQL_OPTIONS,
    )
    create_table(
        "platform_switch",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("available", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(256), nullable=False),
        sa.Column("changed_by", ascii_text(128), nullable=False),
        sa.Column("changed_at", UtcTime(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_platform_switch_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_platform_switch")),
        comment="Whether jobs can be created. No row: they can.",
        **MYSQL_OPTIONS,
    )
    create_table(
        "queues",
        sa.Column("queue", ascii_text(64), nullable=False),
        sa.Column("paused_at", UtcTime(), nullable=True),
        sa.Column("paused_by", ascii_text(128), nullable=False),
        sa.Column("reason", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("queue", name=op.f("pk_queues")),
        comment="A queue without a row is not paused.",
        **MYSQL_OPTIONS,
    )
    create_table(
        "executors",
        sa.Column("executor_id", ascii_text(128), nullable=False),
        sa.Column("session_epoch", sa.BigInteger(), nullable=False),
        sa.Column("hello_no", sa.BigInteger(), nullable=False),
        sa.Column("version", ascii_text(64), nullable=False),
        sa.Column("job_types_json", long_text(), nullable=False),
        sa.Column("queues_json", long_text(), nullable=False),
        sa.Column("first_seen_at", UtcTime(), nullable=False),
        sa.Column("seen_at", UtcTime(), nullable=False),
        sa.Column("reported_at", UtcTime(), nullable=False),
        sa.Column("disconnected_at", UtcTime(), nullable=True),
        sa.Column("lost_at", UtcTime(), nullable=True),
        sa.Column("drain_requested_at", UtcTime(), nullable=True),
        sa.CheckConstraint(
            "lost_at IS NULL OR disconnected_at IS NOT NULL", name=op.f("ck_executors_lost_was_disconnected")
        ),
        sa.PrimaryKeyConstraint("executor_id", name=op.f("pk_executors")),
        comment="One row per executor process. Locked before the jobs that it holds.",
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_executors_seen_at"), "executors", ["seen_at"], unique=False)


def _jobs() -> None:
    alter_table(
        "jobs",
        columns=[
            sa.Column("lapsed_at", UtcTime(), nullable=True),
            sa.Column("takeover_count", sa.Integer(), nullable=False, server_default="0"),
            sa.Column("run_at", UtcTime(), nullable=True),
            sa.Column("due_at", UtcTime(), nullable=True),
            sa.Column("retry_of", ascii_text(36), nullable=True),
            sa.Column("root_job_id", ascii_text(36), nullable=True),
            sa.Column(
                "legacy_status",
                ascii_text(16),
                sa.Computed(
                    "CASE lifecycle_status WHEN 'queued' THEN 'pending' WHEN 'running' THEN 'processing'"
                    " WHEN 'succeeded' THEN 'completed' ELSE lifecycle_status END",
                    persisted=False,
                ),
            ),
        ],
        checks={
            "ck_jobs_running_is_leased": "(lifecycle_status = 'running') = (lease_token IS NOT NULL"
            " OR lapsed_at IS NOT NULL)",
            "ck_jobs_lapsed_has_no_lease": "lapsed_at IS NULL OR (lease_token IS NULL AND cancel_requested_at IS NULL)",
        },
    )
    for columns in (
        *(["user_id", "job_id"], ["job_type", "job_id"], ["queue", "job_id"]),
        *(["lock_until"], ["lapsed_at", "job_id"], ["locked_by"], ["retry_of"]),
    ):
        create_index(op.f(f"ix_jobs_{'_'.join(columns)}"), "jobs", columns, unique=False)
    drop_index(op.f("ix_jobs_lifecycle_status_lock_until"), "jobs")


def _outbox_events() -> None:
    alter_table(
        "outbox_events",
        columns=[sa.Column("queue", ascii_text(64), nullable=False, server_default="")],
    )
    # Events of both versions are claimed by their queue.
    op.execute(
        "UPDATE outbox_events SET queue = (SELECT jobs.queue FROM jobs WHERE jobs.job_id = outbox_events.aggregate_id)"
        " WHERE event_type = 'ai.job.enqueue' AND queue = ''"
        " AND EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = outbox_events.aggregate_id)"
    )
    create_index(
        op.f("ix_outbox_events_status_queue_available_at_id"),
        "outbox_events",
        ["status", "queue", "available_at", "id"],
        unique=False,
    )
    drop_index(op.f("ix_outbox_events_status_available_at_id"), "outbox_events")
