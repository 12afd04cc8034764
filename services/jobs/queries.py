"""Reading jobs: one, a page, and what may be seen by whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from aijobs.errors import InvalidInput, JobNotFound
from aijobs.states import JobState
from services.jobs.store import contents, history, usage
from services.jobs.store import jobs as job_store
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.database import Database, Transaction
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import JobRow
from services.jobs.store.usage import Totals

LARGEST_PAGE = 100
DEFAULT_PAGE = 50
NO_USAGE = Totals()


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who asks. `user_id` is the only user whose jobs exist for this viewer; None: every user's do."""

    caller: str
    user_id: str | None


def visible(viewer: Viewer, job_id: str, job: JobRow | None) -> JobRow:
    """Return the job if the viewer may know of it.

    Raises:
        JobNotFound: no such job, or somebody else's; never said which (AP-2).

    """
    if job is None or (viewer.user_id is not None and viewer.user_id != job.user_id):
        raise JobNotFound(job_id)
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """A job with what it left behind and what it used."""

    job: JobRow
    artifacts: Sequence[ArtifactRow] = ()
    output_json: str | None = None
    usage: Totals = NO_USAGE
    #: Jobs that its result called for, oldest first.
    follow_up_job_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs to list; empty selects everything."""

    user_id: str = ""
    job_type: str = ""
    states: Sequence[JobState] = ()
    queue: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of jobs, newest first."""

    jobs: Sequence[JobDetail]
    next_page_token: str


class JobQueries:
    """Reads jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, viewer: Viewer, job_id: str, *, full: bool) -> JobDetail:
        """Read one job; with `full` also its output and the contents of its artifacts.

        Raises:
            JobNotFound: no such job, or somebody else's.
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> JobDetail:
            job = visible(viewer, job_id, (await job_store.get(tx, [job_id])).get(job_id))
            return JobDetail(
                job=job,
                artifacts=(await contents.artifacts(tx, [job_id], with_content=full)).get(job_id, ()),
                output_json=(await job_store.outputs(tx, [job_id])).get(job_id) if full else None,
                usage=(await usage.totals(tx, [job_id])).get(job_id, NO_USAGE),
                # Only a result calls for other jobs.
                follow_up_job_ids=await job_store.follow_ups(tx, job_id)
                if job.lifecycle_status == JobState.SUCCEEDED
                else (),
            )

        return await self._database.read(work)

    async def page(self, viewer: Viewer, wanted: JobFilter, *, size: int, token: str) -> JobPage:
        """Read a page of jobs that fit the filter.

        Args:
            viewer: sees only the jobs it may know of.
            wanted: the filter.
            size: jobs at most; 0 means 50.
            token: `next_page_token` of the page before; empty for the first.

        Raises:
            InvalidInput: the size is out of range or the token is none of ours.
            Unavailable: the database cannot be reached.

        """
        if not 0 <= size <= LARGEST_PAGE:
            raise InvalidInput.field("page_size", f"must be from 0 to {LARGEST_PAGE}")
        if token and not (token.isascii() and len(token) == 36):  # noqa: PLR2004 - the length of a UUID's text
            raise InvalidInput.field("page_token", "not a token of an earlier page")
        if viewer.user_id is not None and wanted.user_id not in ("", viewer.user_id):
            return JobPage(jobs=(), next_page_token="")
        limit = size or DEFAULT_PAGE

        async def work(tx: Transaction) -> JobPage:
            rows = await job_store.page(
                tx,
                user_id=viewer.user_id or wanted.user_id,
                job_type=wanted.job_type,
                queue=wanted.queue,
                states=wanted.states,
                before=token,
                limit=limit + 1,
            )
            shown = rows[:limit]
            used = await usage.totals(tx, [row.job_id for row in shown])
            return JobPage(
                jobs=[JobDetail(job=row, usage=used.get(row.job_id, NO_USAGE)) for row in shown],
                next_page_token=shown[-1].job_id if len(rows) > limit else "",
            )

        return await self._database.read(work)

    async def history(self, job_id: str, *, after_sequence: int) -> list[HistoryRow]:
        """Read up to 100 history entries of a job, in order, with numbers above `after_sequence`.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._database.read(lambda tx: history.after(tx, job_id, after_sequence))

    async def signs(self, job_ids: Sequence[str]) -> dict[str, job_store.Sign]:
        """Read how far jobs are.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return dict(await self._database.read(lambda tx: job_store.signs(tx, job_ids)))
