"""Statements on `job_snapshots` and `job_artifacts`: what jobs work on and what they leave behind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select

from services.jobs.store.database import Transaction
from services.jobs.store.tables import job_artifacts, job_snapshots
from services.jobs.store.time import now


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job's frozen input."""

    schema_version: str
    content_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """One artifact; the content is None where it was not asked for."""

    job_id: str
    artifact_type: str
    artifact_id: str
    ordinal: int
    content_json: str | None


async def insert_snapshots(tx: Transaction, new: Mapping[str, Snapshot]) -> None:
    """Insert the snapshots of new jobs, by job id."""
    rows = [{"job_id": job_id, **asdict(snapshot)} for job_id, snapshot in new.items()]
    await tx.execute(insert(job_snapshots).values(created_at=now()), rows)


async def snapshots(tx: Transaction, job_ids: Iterable[str]) -> dict[str, Snapshot]:
    """Read the snapshots of jobs."""
    columns = (job_snapshots.c.job_id, job_snapshots.c.schema_version, job_snapshots.c.content_json)
    result = await tx.execute(select(*columns).where(job_snapshots.c.job_id.in_(list(job_ids))))
    return {job_id: Snapshot(schema_version=version, content_json=text) for job_id, version, text in result}


async def insert_artifacts(tx: Transaction, rows: Sequence[ArtifactRow]) -> None:
    """Insert artifacts. A conflict is never absorbed: it fails the whole transaction (ruling 22)."""
    if not rows:
        return
    await tx.execute(
        insert(job_artifacts).values(created_at=now()),
        [
            {
                "job_id": row.job_id,
                "artifact_type": row.artifact_type,
                "artifact_id": row.artifact_id,
                "ordinal": row.ordinal,
                "content_json": row.content_json,
            }
            for row in rows
        ],
    )


async def artifacts(tx: Transaction, job_ids: Iterable[str], *, with_content: bool) -> dict[str, list[ArtifactRow]]:
    """Read the artifacts of jobs, by type and ordinal."""
    table = job_artifacts.c
    columns = [table.job_id, table.artifact_type, table.artifact_id, table.ordinal]
    if with_content:
        columns.append(table.content_json)
    statement = select(*columns).where(table.job_id.in_(list(job_ids)))
    found: dict[str, list[ArtifactRow]] = {}
    for row in (await tx.execute(statement.order_by(table.job_id, table.artifact_type, table.ordinal))).mappings():
        artifact = ArtifactRow(**{"content_json": None, **row})
        found.setdefault(artifact.job_id, []).append(artifact)
    return found
