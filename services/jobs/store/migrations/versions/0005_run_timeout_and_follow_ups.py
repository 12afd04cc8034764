"""How long a run may take in all, which job a follow-up job comes from, and the trace that a job belongs to.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import VARCHAR

from services.jobs.store.migrations.steps import alter_table, create_index

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Frozen here: the tables of the code go on without this migration.
ASCII_36, ASCII_512 = (
    sa.String(length).with_variant(VARCHAR(length, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
    for length in (36, 512)
)


def upgrade() -> None:
    alter_table(
        "jobs",
        columns=[
            # Jobs of before have no bound, as they had none when they were made.
            sa.Column("run_timeout_ms", sa.BigInteger(), nullable=True),
            sa.Column("parent_job_id", ASCII_36, nullable=True),
            sa.Column("depth", sa.SmallInteger(), nullable=False, server_default="0"),
            sa.Column("trace_context", ASCII_512, nullable=True),
        ],
    )
    create_index(op.f("ix_jobs_parent_job_id"), "jobs", ["parent_job_id"], unique=False)
