"""The order of a queue's events, scheduled events, signs of life of dispatchers, depths of the broker's queues.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR

from services.jobs.store.migrations.steps import alter_table, create_index, create_table, drop_index
from services.jobs.store.time import UtcTime

revision = "0003"
down_revision = "0002"
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
        "dispatchers",
        sa.Column("dispatcher_id", ascii_text(128), nullable=False),
        sa.Column("event_types_json", long_text(), nullable=False),
        sa.Column("first_seen_at", UtcTime(), nullable=False),
        sa.Column("seen_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("dispatcher_id", name=op.f("pk_dispatchers")),
        comment="One row per dispatcher process. Its claims end when it is not seen any more.",
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_dispatchers_seen_at"), "dispatchers", ["seen_at"], unique=False)
    create_table(
        "virtual_times",
        sa.Column("user_id", ascii_text(128), nullable=False),
        sa.Column("queue", ascii_text(64), nullable=False),
        sa.Column("priority", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("virtual_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "queue", "priority", name=op.f("pk_virtual_times")),
        comment="Where the next job of a user takes its place in the order of a queue. One in the past says nothing.",
        **MYSQL_OPTIONS,
    )
    create_index(op.f("ix_virtual_times_virtual_at"), "virtual_times", ["virtual_at"], unique=False)
    alter_table(
        "queues",
        columns=[
            sa.Column("ready", sa.Integer(), nullable=True),
            sa.Column("ready_at", UtcTime(), nullable=True),
            sa.Column("ready_before", sa.Integer(), nullable=True),
            sa.Column("ready_before_at", UtcTime(), nullable=True),
        ],
        checks={
            "ck_queues_ready_has_time": "(ready IS NULL) = (ready_at IS NULL)",
            "ck_queues_ready_before_has_time": "(ready_before IS NULL) = (ready_before_at IS NULL)",
        },
    )


def _jobs() -> None:
    alter_table("jobs", columns=[sa.Column("rank_at", UtcTime(), nullable=True)])
    # Jobs of before keep the order of their creates; one that is not due yet gets its rank when it is.
    op.execute(
        "UPDATE jobs SET rank_at = created_at WHERE rank_at IS NULL AND due_at IS NULL"
        " AND lifecycle_status IN ('queued', 'running')"
    )


def _outbox_events() -> None:
    alter_table(
        "outbox_events",
        columns=[
            sa.Column("rank_at", UtcTime(), nullable=True),
            sa.Column("settled_at", UtcTime(), nullable=True),
        ],
        nullable={"available_at": UtcTime()},
    )
    _settle_times()
    op.execute("UPDATE outbox_events SET status = 'scheduled' WHERE status = 'pending' AND available_at > created_at")
    # Dispatches of jobs that are not due yet get their places when they are, as their jobs do.
    op.execute(
        "UPDATE outbox_events SET rank_at = created_at WHERE rank_at IS NULL"
        " AND (status <> 'scheduled' OR event_type <> 'ai.job.enqueue'"
        " OR EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = outbox_events.aggregate_id AND jobs.rank_at IS NOT NULL))"
    )
    op.execute("UPDATE outbox_events SET available_at = NULL WHERE status <> 'scheduled'")
    alter_table(
        "outbox_events",
        checks={
            "ck_outbox_events_published_has_time": None,
            "ck_outbox_events_scheduled_has_time": "(status = 'scheduled') = (available_at IS NOT NULL)",
            "ck_outbox_events_pending_is_ranked": "status <> 'pending' OR rank_at IS NOT NULL",
            "ck_outbox_events_settled_has_time": "(status IN ('published', 'dead', 'discarded'))"
            " = (settled_at IS NOT NULL)",
        },
    )
    alter_table("outbox_events", dropped=["published_at"])
    create_index(
        op.f("ix_outbox_events_status_queue_event_type_rank_at_id"),
        "outbox_events",
        ["status", "queue", "event_type", "rank_at", "id"],
        unique=False,
    )
    create_index(op.f("ix_outbox_events_available_at"), "outbox_events", ["available_at"], unique=False)
    create_index(op.f("ix_outbox_events_settled_at"), "outbox_events", ["settled_at"], unique=False)
    drop_index(op.f("ix_outbox_events_status_queue_available_at_id"), "outbox_events")


def _settle_times() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("outbox_events")}
    if "published_at" in columns:
        op.execute("UPDATE outbox_events SET settled_at = published_at WHERE published_at IS NOT NULL")
    op.execute(
        "UPDATE outbox_events SET settled_at = created_at WHERE settled_at IS NULL AND status IN ('dead', 'discarded')"
    )
