"""Recording model calls in the ledger, whatever became of the run that made them (EX-6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aijobs.errors import AijobsError, JobNotFound
from services.jobs.batches import write_each
from services.jobs.store import jobs as job_store
from services.jobs.store import usage
from services.jobs.store.database import Database, Transaction
from services.jobs.store.usage import Call


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
        known = [call for call in batch if call.job_id in rows and call.attempt <= rows[call.job_id].attempt]
        await usage.record(
            tx,
            [
                replace(
                    call,
                    user_id=job.user_id,
                    job_type=job.job_type,
                    late=job.lifecycle_status.terminal or job.attempt != call.attempt,
                )
                for call in known
                for job in [rows[call.job_id]]
            ],
        )
        return [Recorded() if call in known else JobNotFound(call.job_id) for call in batch]
