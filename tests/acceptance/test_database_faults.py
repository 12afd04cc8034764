"""What databases do to a service: creates at once, cut statements, lost answers to COMMIT, foreign time zones.

The jobs service alone, over gRPC, on MariaDB: nobody publishes or runs what is created here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import grpc
import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from aijobs import canonical
from aijobs.client import Client
from aijobs.errors import InvalidIdempotencyKey
from aijobs.rpc.roles import Role
from aijobs.v1 import job_pb2, job_service_pb2
from deploy.local.database import DatabaseAddress
from deploy.local.lifeline import Lifeline
from deploy.local.machine import LocalMachine
from deploy.local.processes import ServiceProcess
from deploy.local.provision import DatabaseServer, own_database
from services.jobs.store.database import TRIES
from services.jobs.store.tables import job_artifacts, job_history, jobs, outbox_events
from tests.acceptance.engine import Engine
from tests.acceptance.gate import Gate
from tests.acceptance.jobs_alone import a_create, a_success, answers_logged, calling, jobs_alone
from tests.acceptance.lost_commits import LostCommits

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")
NewDatabase = Callable[[], Awaitable[str]]

POOL = 5
LEASE = timedelta(seconds=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def new_database(mariadb_address: DatabaseAddress) -> AsyncIterator[NewDatabase]:
    """Make an empty database and return its URL."""
    names: list[str] = []

    async def make() -> str:
        names.append(name := f"test_{uuid4().hex}")
        return await mariadb_address.create_database(name)

    yield make
    for name in names:
        await mariadb_address.drop_database(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(new_database: NewDatabase, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    url = await new_database()
    async with jobs_alone(tmp_path_factory.mktemp("engine"), url, AIJOBS_DATABASE_POOL_SIZE=str(POOL)) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.jobs.log.write_bytes(b"")
    return shared_engine


@pytest_asyncio.fixture(loop_scope="module")
async def replica(engine: Engine) -> AsyncIterator[ServiceProcess]:
    """A second jobs service on the same database."""
    process = await engine.add("jobs")
    yield process
    await process.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.long)])
async def test_fifty_creates_at_once_with_one_key_make_one_job(
    engine: Engine, replica: ServiceProcess, rounds: int
) -> None:
    """Case D1, over two replicas: nothing but the database can put the creates in line."""
    keys = [uuid4().hex for _ in range(rounds)]
    job_ids = []
    async with (
        Client(engine.jobs.address, engine.token(Role.BACKEND), patience=timedelta(0)) as one,
        Client(replica.address, engine.token(Role.BACKEND), patience=timedelta(0)) as other,
    ):
        for key in keys:
            # A new user each time: the row that creates wait for is not there yet either.
            fifty = [client.create("synthetic", user_id=key, idempotency_key=key) for client in (one, other) * 25]
            answers = await asyncio.gather(*fifty)
            job_ids.append(answers[0].job.job_id)
            assert {answer.job.job_id for answer in answers} == {job_ids[-1]}
            assert sum(not answer.deduplicated for answer in answers) == 1
    stored = [row["job_id"] for row in await engine.read(jobs) if row["idempotency_key"] in keys]
    assert sorted(stored) == sorted(job_ids)
    events = [row["aggregate_id"] for row in await engine.read(outbox_events)]
    assert sorted(job_id for job_id in events if job_id in stored) == sorted(job_ids)
    # Each at the first try.
    for process in (engine.jobs, replica):
        assert answers_logged(process, "CreateJob") == ["OK"] * 25 * rounds


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.long)])
async def test_calls_cut_by_deadlines_neither_mix_up_answers_nor_cost_connections(engine: Engine, count: int) -> None:
    """Case D3: a connection that was left in the middle of a statement would answer the next caller with its rest."""
    patient: list[str] = []
    hurried: list[str] = []
    async with calling(engine) as stubs:
        job_ids = [(await stubs.create()).job_id for _ in range(20)]
        for job_id in job_ids:
            # So that there is much to read, all of which tells the job.
            await stubs.submit(a_success((await stubs.lock(job_id)).lease, says=job_id))

        async def ask(number: int, milliseconds: int) -> str:
            job_id = job_ids[number % len(job_ids)]
            request = job_service_pb2.GetJobRequest(job_id=job_id, view=job_pb2.JOB_VIEW_FULL)
            try:
                job = (await stubs.jobs.GetJob(request, timeout=milliseconds / 1000)).job
            except grpc.aio.AioRpcError as error:
                return error.code().name
            assert job.job_id == job_id
            contents = {job.output_json, *(artifact.content_json for artifact in job.artifacts)}
            assert contents == {canonical.dump({"says": job_id})}
            return "OK"

        async def ask_in_turn(numbers: Iterator[int], *, all_patient: bool) -> None:
            for number in numbers:
                if all_patient or number % 2:
                    patient.append(await ask(number, 10_000))
                else:
                    hurried.append(await ask(number, 1 + number // 2 % 5))

        async def ask_together(numbers: range, *, at_a_time: int, all_patient: bool = False) -> None:
            rest = iter(numbers)
            await asyncio.gather(*(ask_in_turn(rest, all_patient=all_patient) for _ in range(at_a_time)))

        await ask_together(range(100), at_a_time=POOL + 3, all_patient=True)
        before = await engine.server_connections()
        assert len(before) == POOL
        # Few, or a call would spend its milliseconds before it gets to the database.
        await ask_together(range(count), at_a_time=2)
        await ask_together(range(100), at_a_time=POOL + 3, all_patient=True)
    assert patient == ["OK"] * (100 + count // 2 + 100)
    assert len(hurried) == count // 2
    assert set(hurried) <= {"OK", "DEADLINE_EXCEEDED"}
    assert "CANCELLED" in answers_logged(engine.jobs, "GetJob"), "some were cut inside the service"
    # Not even replaced by others: what was under way was finished.
    assert await engine.server_connections() == before


async def test_keys_are_exact_to_the_letter_and_are_printable_ascii(engine: Engine) -> None:
    """Case D5: what collations fold, cut off, or cannot store."""
    user = uuid4().hex
    async with engine.client() as client:

        async def create(key: str) -> str:
            return (await client.create("synthetic", user_id=user, idempotency_key=key)).job.job_id

        keys = ("Order-1", "order-1", "ORDER-1")
        ids = [await create(key) for key in keys]
        assert len(set(ids)) == 3
        assert [await create(key) for key in keys] == ids
        for key in ("k ", " k", "order-1 ", "é", "\N{GRINNING FACE}", "e\N{COMBINING ACUTE ACCENT}"):
            with pytest.raises(InvalidIdempotencyKey) as refused:
                await create(key)
            assert refused.value.status is grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in refused.value.violations] == ["idempotency_key"]
    assert len(await engine.read(jobs, user_id=user)) == 3


@pytest.fixture(scope="module")
def commits() -> LostCommits:
    return LostCommits()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_lossy_engine(
    new_database: NewDatabase, commits: LostCommits, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """A jobs service; on the way to it, its database's answers to COMMIT can get lost."""
    url = await new_database()
    gate = Gate(url, link=commits.link)
    await gate.open()
    async with jobs_alone(tmp_path_factory.mktemp("engine"), gate.url, direct_database_url=url) as engine:
        yield engine
    await gate.shut()


@pytest.fixture
def lossy_engine(shared_lossy_engine: Engine, commits: LostCommits) -> Engine:
    commits.lose(0, about="")
    shared_lossy_engine.jobs.log.write_bytes(b"")
    return shared_lossy_engine


#: How often in a row the answer is lost, and what is then answered to a call and to its later repeat.
LOSSES = pytest.mark.parametrize(
    ("times", "answered"),
    [(1, ["OK", "OK"]), (TRIES + 1, ["UNAVAILABLE", "OK", "OK"])],
    ids=["the service finds out", "the caller has to repeat"],
)


async def answer_in_spite_of_losses(
    call: Callable[[], Awaitable[T]],
    commits: LostCommits,
    times: int,
    about: str,
    stored: Callable[[], Awaitable[None]],
) -> T:
    """Case D4: make a call, and look at what is stored whenever the answer to its commit is about to be lost."""

    async def made() -> T:
        return await call()

    commits.lose(times, about=about)
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(made())
        for _ in range(times):
            async with commits.lost():
                await stored()
    return answer.result()


@LOSSES
async def test_a_create_has_one_effect_though_the_answer_to_its_commit_is_lost(
    lossy_engine: Engine, commits: LostCommits, times: int, answered: list[str]
) -> None:
    request = a_create(user_id=uuid4().hex)

    async def stored() -> None:
        (job,) = await lossy_engine.read(jobs, user_id=request.user_id)
        assert await lossy_engine.kinds(job["job_id"]) == ["created"]
        assert await lossy_engine.event_statuses(job["job_id"]) == {"ai.job.enqueue": "pending"}

    async with calling(lossy_engine) as stubs:
        answer = await answer_in_spite_of_losses(
            lambda: stubs.jobs.CreateJob(request), commits, times, request.user_id, stored
        )
        assert await stubs.jobs.CreateJob(request) == answer
    assert answers_logged(lossy_engine.jobs, "CreateJob") == answered
    assert not answer.deduplicated
    await stored()
    assert [row["job_id"] for row in await lossy_engine.read(jobs, user_id=request.user_id)] == [answer.job.job_id]


@LOSSES
async def test_a_result_has_one_effect_though_the_answer_to_its_commit_is_lost(
    lossy_engine: Engine, commits: LostCommits, times: int, answered: list[str]
) -> None:
    async with calling(lossy_engine) as stubs:
        lease = (await stubs.running()).lease
        outcome = a_success(lease)

        async def stored() -> None:
            assert (await lossy_engine.row(lease.job_id))["output_json"] == outcome.succeeded.output_json
            assert len(await lossy_engine.read(job_artifacts, job_id=lease.job_id)) == 2
            assert await lossy_engine.kinds(lease.job_id) == ["created", "locked", "succeeded"]
            assert len(await lossy_engine.read(outbox_events, aggregate_id=lease.job_id)) == 2

        answer = await answer_in_spite_of_losses(lambda: stubs.submit(outcome), commits, times, lease.job_id, stored)
        assert await stubs.submit(outcome) == answer
    assert answers_logged(lossy_engine.jobs, "SubmitOutcomes") == answered
    assert (answer.job.state, answer.job.artifact_count) == (job_pb2.JOB_STATE_SUCCEEDED, 2)
    await stored()


@LOSSES
@pytest.mark.parametrize("state", ["queued", "running"])
async def test_a_cancel_has_one_effect_though_the_answer_to_its_commit_is_lost(
    lossy_engine: Engine, commits: LostCommits, state: str, times: int, answered: list[str]
) -> None:
    if state == "queued":
        outcome, kinds = job_service_pb2.CANCEL_OUTCOME_CANCELLED, ["created", "cancelled"]
        events = ["ai.job.enqueue", "ai.job.cancelled"]
    else:
        outcome, kinds = job_service_pb2.CANCEL_OUTCOME_REQUESTED, ["created", "locked", "cancel_requested"]
        events = ["ai.job.enqueue"]
    async with calling(lossy_engine) as stubs:
        job_id = (await stubs.create()).job_id
        if state == "running":
            await stubs.lock(job_id)
        request = job_service_pb2.CancelJobRequest(request_id=uuid4().hex, job_id=job_id)

        async def stored() -> None:
            assert await lossy_engine.kinds(job_id) == kinds
            written = await lossy_engine.read(outbox_events, aggregate_id=job_id)
            assert [event["event_type"] for event in written] == events

        answer = await answer_in_spite_of_losses(lambda: stubs.jobs.CancelJob(request), commits, times, job_id, stored)
        assert await stubs.jobs.CancelJob(request) == answer
    assert answers_logged(lossy_engine.jobs, "CancelJob") == answered
    assert answer.outcome == outcome
    await stored()


@LOSSES
async def test_a_lock_hands_out_one_lease_though_the_answer_to_its_commit_is_lost(
    lossy_engine: Engine, commits: LostCommits, times: int, answered: list[str]
) -> None:
    """Case L7."""
    token = uuid4().hex
    async with calling(lossy_engine) as stubs:
        job_id = (await stubs.create()).job_id

        async def stored() -> None:
            row = await lossy_engine.row(job_id)
            assert (row["attempt"], row["lease_token"]) == (1, token)
            assert await lossy_engine.kinds(job_id) == ["created", "locked"]

        locked = await answer_in_spite_of_losses(lambda: stubs.lock(job_id, token), commits, times, job_id, stored)
        assert (await stubs.lock(job_id, token)).lease == locked.lease
    assert answers_logged(lossy_engine.jobs, "LockJobs") == answered
    assert (locked.lease.attempt, locked.lease.lease_token) == (1, token)
    await stored()


@LOSSES
async def test_a_claim_holds_the_same_events_though_the_answer_to_its_commit_is_lost(
    lossy_engine: Engine, commits: LostCommits, times: int, answered: list[str]
) -> None:
    """Case L7."""
    token = uuid4().hex
    async with calling(lossy_engine) as stubs:
        while await stubs.claim():
            pass  # what other tests left behind
        lossy_engine.jobs.log.write_bytes(b"")
        job_id = (await stubs.create()).job_id

        async def stored() -> None:
            (event,) = await lossy_engine.read(outbox_events, aggregate_id=job_id)
            assert (event["status"], event["claim_token"]) == ("processing", token)

        claimed = await answer_in_spite_of_losses(lambda: stubs.claim(token), commits, times, token, stored)
        assert await stubs.claim(token) == claimed
    assert answers_logged(lossy_engine.jobs, "ClaimEvents") == answered
    assert [event.aggregate_id for event in claimed] == [job_id]
    await stored()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tokyo_mariadb(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DatabaseServer]:
    """A database server whose sessions are nine hours ahead of UTC if they do not say otherwise."""
    folder = tmp_path_factory.mktemp("tokyo")
    lifeline = Lifeline(folder / "lifeline").hold()
    server = own_database(folder / "mariadb", lifeline=lifeline, machine=LocalMachine())
    await server.start()
    engine = create_async_engine(server.address.url("mysql"))
    async with engine.begin() as connection:
        await connection.execute(text("SET GLOBAL time_zone = '+09:00'"))
    await engine.dispose()
    yield server
    await server.discard()
    lifeline.release()


async def test_times_are_utc_and_leases_right_in_foreign_time_zones(
    tokyo_mariadb: DatabaseServer, tmp_path: Path
) -> None:
    """Case D6. Over changes of the clocks: tests/conformance/test_time_zones.py."""
    url = await tokyo_mariadb.create_database("aijobs")
    started = datetime.now(UTC)
    async with jobs_alone(tmp_path, url, TZ="EST5EDT,M3.2.0,M11.1.0") as engine, calling(engine) as stubs:
        locked = await stubs.running()
        leased = await engine.row(locked.job.job_id)
        # Due at once.
        assert [event.aggregate_id for event in await stubs.claim()] == [locked.job.job_id]
        job = (await stubs.submit(a_success(locked.lease))).job
        written = [*await engine.read(jobs), *await engine.read(job_history), *await engine.read(outbox_events)]
    ended = datetime.now(UTC)
    told = [job.create_time, job.start_time, job.finish_time]
    assert started < told[0].ToDatetime(UTC) < told[1].ToDatetime(UTC) < told[2].ToDatetime(UTC) < ended
    # A rank is no time of the clock: priority moves it.
    times = [
        value for row in written for name, value in row.items() if isinstance(value, datetime) and name != "rank_at"
    ]
    assert len(times) >= 10
    assert started < leased["lock_until"] - LEASE < ended
    assert [moment for moment in times if not started < moment < ended + LEASE] == []
    assert LEASE - timedelta(seconds=5) < locked.remaining.ToTimedelta() <= LEASE
