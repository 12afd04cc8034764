"""What a transition writes besides the job's row, in the same transaction: its history, its event, who is woken.

Every change of a job goes through here, whoever decided it: one place sees to it that an end is told, that a job that
waits is dispatched, and that watchers and dispatchers hear of it once it is committed, never before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.jobs import events
from services.jobs.store import changes, contents, outbox
from services.jobs.store import jobs as job_store
from services.jobs.store.changes import Change, Kind
from services.jobs.store.contents import Snapshot
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups


async def begin(
    tx: Transaction,
    wakeups: Wakeups,
    new: Sequence[tuple[Mapping[str, Any], Snapshot]],
    *,
    actor: str,
    kind: Kind = Kind.CREATED,
    reason: str = "",
) -> dict[str, JobRow]:
    """Insert queued jobs with their snapshots, first history entries and enqueue events; return their rows (CR-1)."""
    if not new:
        return {}
    await changes.insert_queued(tx, [row for row, _ in new], actor=actor, kind=kind, reason=reason)
    await contents.insert_snapshots(tx, {row["job_id"]: snapshot for row, snapshot in new})
    return await _announce(tx, wakeups, [row["job_id"] for row, _ in new])


async def carry_out(tx: Transaction, wakeups: Wakeups, planned: Sequence[Change]) -> dict[str, JobRow]:
    """Apply changes, at most one a job, and return the rows after them.

    Raises:
        StaleChange: a row was not as its change expects; nothing of this transaction may be committed.

    """
    if not planned:
        return {}
    await changes.apply(tx, planned)
    job_ids = [change.job_id for change in planned]
    tx.after_commit(lambda: wakeups.jobs_changed(job_ids))
    return await _announce(tx, wakeups, job_ids)


async def _announce(tx: Transaction, wakeups: Wakeups, job_ids: Sequence[str]) -> dict[str, JobRow]:
    rows = await job_store.get(tx, job_ids)
    told = [event for job_id in job_ids if (event := events.of(rows[job_id])) is not None]
    await outbox.append(tx, told)
    if told:
        tx.after_commit(wakeups.events.give)
    return rows
