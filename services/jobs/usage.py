"""Recording model calls in the ledger, whatever became of the run that made them (EX-6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from aijobs.errors import AijobsError, JobNotFound
from services.jobs.batches import write_each
from services.jobs.store import jobs as job_store
from services.jobs.store import usage
from services.jobs.store.database import Database, Transaction
from services.jobs.store.usage import Call, Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A call is in the ledger."""


class UsageLedger:
    """Stores model calls."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, batch: Sequence[Call]) -> list[Recorded | AijobsError]:
        """Store calls. User, job type and lateness are taken from the job, not from the caller.

        Errors per item: JobNotFound.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await write_each(self._database, batch, self._record)

    @staticmethod
    async def _record(tx: Transaction, batch: Sequence[Call]) -> list[Recorded | AijobsError]:
        rows = await job_store.get(tx, (call.job_id for call in batch), lock=True)
        entries: list[Entry] = []
        results: list[Recorded | AijobsError] = []
        for call in batch:
            job = rows.get(call.job_id)
            if job is None or call.attempt > job.attempt:
                results.append(JobNotFound(call.job_id))
                continue
            late = job.lifecycle_status.terminal or job.attempt != call.attempt
            entries.append(Entry(call=call, user_id=job.user_id, job_type=job.job_type, late=late))
            results.append(Recorded())
        await usage.record(tx, entries)
        return results
