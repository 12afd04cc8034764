"""Indexes by which old jobs, snapshots and answers to requests are found.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

from services.jobs.store.migrations.steps import create_index, drop_index

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_index(
        op.f("ix_jobs_job_type_lifecycle_status_finished_at"),
        "jobs",
        ["job_type", "lifecycle_status", "finished_at"],
        unique=False,
    )
    create_index(op.f("ix_job_snapshots_created_at"), "job_snapshots", ["created_at"], unique=False)
    # Answers go with their jobs, not by their age.
    create_index(op.f("ix_requests_job_id"), "requests", ["job_id"], unique=False)
    drop_index(op.f("ix_requests_created_at"), "requests")
