"""What a result leaves behind, committed with the success or not at all: artifacts, follow-up jobs, rows (PJ-2).

check     before the transaction: sizes, names, inputs; it may take a while
prepare   first in the transaction: users come before jobs in the order of locks
require   on the locked row of the job: what only the database can tell
write     after the job's own change
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aijobs.errors import AijobsError
from services.jobs.admission import Admitted
from services.jobs.business_rows import BusinessRows, Contents
from services.jobs.follow_ups import FollowUpJobs
from services.jobs.results import Succeeded, problem_of
from services.jobs.store import contents
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The projection of one result, as far as it can be checked without the database."""

    artifacts: Sequence[ArtifactRow] = ()
    follow_ups: Sequence[Admitted] = ()
    rows: Contents = field(default_factory=dict)


NOTHING = Checked()


class Projections:
    """Checks and writes projections."""

    def __init__(self, follow_ups: FollowUpJobs, rows: BusinessRows) -> None:
        self._follow_ups = follow_ups
        self._rows = rows

    async def check(self, job_id: str, result: Succeeded) -> Checked | AijobsError:
        """Check a result and its projection; return what is wrong with it, by field, as an InvalidInput."""
        if (problem := await problem_of(job_id, result)) is not None:
            return problem
        try:
            return Checked(
                artifacts=result.artifacts,
                follow_ups=await self._follow_ups.admit(job_id, result.follow_ups),
                rows=await self._rows.read(result.rows),
            )
        except AijobsError as error:
            return error

    async def prepare(self, tx: Transaction, projections: Sequence[tuple[str, Checked]]) -> None:
        """Lock the users of the jobs that call for other jobs."""
        parents = [job_id for job_id, projection in projections if projection.follow_ups]
        if parents:
            await self._follow_ups.lock_users(tx, parents)

    async def require(self, tx: Transaction, job: JobRow, projection: Checked) -> None:
        """Check what only the job's row can tell; writes nothing.

        Raises:
            InvalidInput: the chain of jobs is too deep already, or a row is none of the job's user's.

        """
        self._follow_ups.require_depth(job, projection.follow_ups)
        await self._rows.check(tx, job, projection.rows)

    async def write(self, tx: Transaction, projections: Mapping[str, Checked], jobs: Mapping[str, JobRow]) -> None:
        """Write the projections of jobs that have just succeeded, by job id."""
        await contents.insert_artifacts(tx, [row for found in projections.values() for row in found.artifacts])
        await self._follow_ups.create(tx, {job_id: found.follow_ups for job_id, found in projections.items()}, jobs)
        for job_id, found in projections.items():
            await self._rows.write(tx, jobs[job_id], found.rows)
