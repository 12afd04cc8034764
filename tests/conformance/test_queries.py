"""AP-1: reading one job, a page of jobs, and a job as it changes."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from aijobs.errors import InvalidInput, JobNotFound
from aijobs.states import JobState
from services.jobs import watching
from services.jobs.leasing import Extend
from services.jobs.queries import JobFilter, JobQueries, Viewer
from services.jobs.store.history import HistoryRow
from services.jobs.store.jobs import Sign
from services.jobs.store.tables import model_invocations
from services.jobs.store.usage import Call, Settled
from services.jobs.usage import Recorded
from services.jobs.watching import JobWatching, Update
from tests.conformance.conftest import BACKEND, Jobs, lease_of, success

ALICE = Viewer(caller="alice", user_id="alice")


async def test_another_users_job_is_not_found(jobs: Jobs) -> None:
    job_id = (await jobs.create(user_id="bob")).job.job_id
    with pytest.raises(JobNotFound):
        await jobs.queries.get(ALICE, job_id, full=False)
    with pytest.raises(JobNotFound):
        await jobs.queries.get(BACKEND, "no-such-job", full=False)


async def test_pages_hold_every_job_once_newest_first(jobs: Jobs) -> None:
    ids = [(await jobs.create()).job.job_id for _ in range(7)]
    seen: list[str] = []
    token = ""
    while True:
        page = await jobs.queries.page(BACKEND, JobFilter(), size=3, token=token)
        seen += [detail.job.job_id for detail in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert seen == ids[::-1]


async def test_filters_narrow_and_users_see_only_their_own(jobs: Jobs) -> None:
    mine = (await jobs.create(user_id="alice")).job.job_id
    await jobs.create(user_id="bob", job_type="fixed")
    running = await jobs.running(user_id="bob")

    async def ids(viewer: Viewer, **wanted) -> list[str]:
        page = await jobs.queries.page(viewer, JobFilter(**wanted), size=0, token="")
        return [detail.job.job_id for detail in page.jobs]

    assert await ids(ALICE) == [mine]
    assert await ids(ALICE, user_id="bob") == []
    assert await ids(BACKEND, states=[JobState.RUNNING]) == [running.job_id]
    assert await ids(BACKEND, user_id="bob", job_type="testing") == [running.job_id]
    assert len(await ids(BACKEND, queue="ai-interactive")) == 3
    assert await ids(BACKEND, queue="ai-background") == []


@pytest.mark.parametrize(
    ("size", "token", "field"), [(101, "", "page_size"), (-1, "", "page_size"), (1, "x", "page_token")]
)
async def test_a_bad_page_is_refused_by_name(jobs: Jobs, size: int, token: str, field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        await jobs.queries.page(BACKEND, JobFilter(), size=size, token=token)
    assert refusal.value.violations[0].field == field


async def test_a_watch_sends_the_present_job_then_every_change_and_ends(jobs: Jobs) -> None:
    job_id = (await jobs.create()).job.job_id
    kinds: list[str] = []

    async def watch() -> None:
        async for update in jobs.watching.watch(BACKEND, job_id, after_sequence=None, include_progress=True):
            assert update.detail is not None
            kinds.append(str(update.transition.kind) if update.transition else f"progress {update.detail.job.progress}")
            seen.set()

    async def until_seen(kind: str) -> None:
        while kind not in kinds:
            seen.clear()
            await seen.wait()

    seen = asyncio.Event()
    async with asyncio.timeout(10):
        watching = asyncio.create_task(watch())
        await until_seen("progress 0")
        locked = await jobs.lock(job_id)
        await until_seen("locked")
        await jobs.leasing.extend("executor-1", [Extend(lease=lease_of(locked), progress=30)])
        await until_seen("progress 30")
        await jobs.submit(lease_of(locked), success())
        await watching
    assert kinds == ["progress 0", "locked", "progress 30", "succeeded"]


async def collect(jobs: Jobs, job_id: str, after_sequence: int | None) -> list[Update]:
    return [
        update
        async for update in jobs.watching.watch(BACKEND, job_id, after_sequence=after_sequence, include_progress=False)
    ]


async def test_a_watch_resumes_after_a_number_and_ends_at_once_on_an_ended_job(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, success())
    everything = await collect(jobs, lease.job_id, 0)
    assert [update.transition.sequence for update in everything if update.transition] == [1, 2, 3]
    resumed = await collect(jobs, lease.job_id, 2)
    assert [update.transition.sequence for update in resumed if update.transition] == [3]
    assert len(await collect(jobs, lease.job_id, None)) == 1


async def test_a_watch_hears_of_other_replicas_commits(jobs: Jobs) -> None:
    """A second service on the same database changes the job; nothing wakes the first one but its poll."""
    job_id = (await jobs.create()).job.job_id
    polled = asyncio.Event()

    class ObservedQueries(JobQueries):
        async def signs(self, job_ids: Sequence[str]) -> dict[str, Sign]:
            found = await super().signs(job_ids)
            polled.set()
            return found

    watching = JobWatching(ObservedQueries(jobs.database), jobs.wakeups)
    polling = asyncio.create_task(watching.run())
    seen: list[str] = []

    async def watch() -> None:
        updates = watching.watch(BACKEND, job_id, after_sequence=None, include_progress=False)
        seen.extend([str(update.transition.kind) if update.transition else "present" async for update in updates])

    async with asyncio.timeout(10):
        following = asyncio.create_task(watch())
        await polled.wait()
        other = Jobs(jobs.database)
        locked = await other.lock(job_id)
        await other.submit(lease_of(locked), success())
        await following
    assert seen == ["present", "locked", "succeeded"]
    polling.cancel()


async def test_what_another_replica_changes_before_the_first_look_is_noticed_too(jobs: Jobs) -> None:
    """The poll's first look at a job counts as a change: it may have changed since its watcher read it."""
    lease = await jobs.running()
    other = Jobs(jobs.database)
    updates = jobs.watching.watch(BACKEND, lease.job_id, after_sequence=None, include_progress=False)
    async with asyncio.timeout(10):
        assert (await anext(updates)).transition is None
        await other.submit(lease, success())
        polling = asyncio.create_task(jobs.watching.run())
        update = await anext(updates)
    assert update.transition is not None
    assert update.transition.kind == "succeeded"
    polling.cancel()


async def test_no_message_shows_a_job_older_than_its_transition(jobs: Jobs) -> None:
    """The job goes on between the two reads of the watch; whoever believes the last message must not be misled."""
    job_id = (await jobs.create()).job.job_id

    class HastyQueries(JobQueries):
        async def history(self, job_id: str, *, after_sequence: int) -> list[HistoryRow]:
            if after_sequence == 0:
                await jobs.submit(lease_of(await jobs.lock(job_id)), success())
            return await super().history(job_id, after_sequence=after_sequence)

    watching_ = JobWatching(HastyQueries(jobs.database), jobs.wakeups)
    async with asyncio.timeout(10):
        updates = [
            update
            async for update in watching_.watch(BACKEND, job_id, after_sequence=0, include_progress=False)
            if update.transition
        ]
    assert [update.transition.kind for update in updates if update.transition] == ["created", "locked", "succeeded"]
    assert [update.detail.job.lifecycle_status for update in updates if update.detail] == [JobState.SUCCEEDED] * 3


async def test_a_busy_job_does_not_starve_the_keep_alive(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress wakes the watcher again and again; if it may send nothing, the keep-alive must come all the same."""
    monkeypatch.setattr(watching, "KEEP_ALIVE", timedelta(milliseconds=200))
    lease = await jobs.running()
    updates = jobs.watching.watch(BACKEND, lease.job_id, after_sequence=None, include_progress=False)
    await anext(updates)

    async def keep_busy() -> None:
        while True:
            await jobs.leasing.extend("executor-1", [Extend(lease=lease, progress=1)])

    busy = asyncio.create_task(keep_busy())
    async with asyncio.timeout(5):
        assert (await anext(updates)) == Update()
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


async def test_unwatched_jobs_are_forgotten(jobs: Jobs) -> None:
    lease = await jobs.running()
    await jobs.submit(lease, success())
    await collect(jobs, lease.job_id, 0)
    assert jobs.wakeups.watched_jobs == []


def call(job_id: str, attempt: int = 1, call_no: int = 1, settled: Settled | None = None) -> Call:
    return Call(
        job_id=job_id,
        attempt=attempt,
        call_no=call_no,
        provider="offline",
        model="offline",
        tier="primary",
        prompt_key="",
        prompt_version="",
        credential_mode="platform_key",
        settled=settled,
    )


def settled(tokens: int) -> Settled:
    return Settled(
        input_tokens=tokens,
        output_tokens=1,
        token_source="measured",
        latency=timedelta(milliseconds=5),
        error_code="",
    )


async def test_usage_is_opened_settled_and_summed_once_however_often_it_is_sent(jobs: Jobs) -> None:
    """EX-6: idempotent by (job, attempt, call number), and recorded after the end too."""
    lease = await jobs.running()
    job_id = lease.job_id
    opened = await jobs.ledger.record([call(job_id), call(job_id)])
    assert opened == [Recorded(), Recorded()]
    assert (await jobs.queries.get(BACKEND, job_id, full=False)).usage.calls == 0, "not settled yet"
    await jobs.ledger.record([call(job_id, settled=settled(10))])
    await jobs.ledger.record([call(job_id, settled=settled(999)), call(job_id)])
    await jobs.submit(lease, success())
    await jobs.ledger.record([call(job_id, call_no=2, settled=settled(5))])
    usage = (await jobs.queries.get(BACKEND, job_id, full=False)).usage
    assert (usage.calls, usage.input_tokens, usage.output_tokens) == (2, 15, 2)


async def test_usage_of_an_unknown_job_or_attempt_is_refused(jobs: Jobs) -> None:
    lease = await jobs.running()
    results = await jobs.ledger.record([call("no-such-job"), call(lease.job_id, attempt=2), call(lease.job_id)])
    assert [isinstance(result, JobNotFound) for result in results] == [True, True, False]


async def test_a_call_is_booked_on_its_jobs_user_and_marked_when_its_run_had_ended(jobs: Jobs) -> None:
    """EX-6: whom a call is booked on is the job's word, and a call after the end is late."""
    lease = await jobs.running(user_id="bob")
    await jobs.ledger.record([call(lease.job_id)])
    await jobs.submit(lease, success())
    await jobs.ledger.record([call(lease.job_id, settled=settled(1)), call(lease.job_id, call_no=2)])
    rows = await jobs.rows(model_invocations, "call_no")
    booked = [(row["call_no"], row["user_id"], row["job_type"], row["late"]) for row in rows]
    assert booked == [(1, "bob", "testing", True), (2, "bob", "testing", True)]
