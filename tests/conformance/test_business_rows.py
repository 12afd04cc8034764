"""PJ-1, PJ-2: rows of business tables are written with the success, for the job's user, or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from pydantic import JsonValue
from sqlalchemy import text

from aijobs.errors import InvalidInput
from aijobs.states import JobState
from services.jobs.business_rows import MOST_ROWS
from services.jobs.execution import Accepted, Outcome
from services.jobs.results import BusinessRow, Succeeded
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from tests.conformance.conftest import BACKEND, Jobs, success


@dataclass
class Cards:
    """Writes cards into a table of its own; one card of a name."""

    checked: list[str] = field(default_factory=list)

    async def check(self, tx: Transaction, job: JobRow, contents: Sequence[JsonValue]) -> None:
        """Refuse a card that names another user."""
        del tx
        for content in contents:
            assert isinstance(content, dict)
            if content.get("user", job.user_id) != job.user_id:
                raise InvalidInput.field("succeeded.projection.rows", "names what is not the user's")
        self.checked.append(job.job_id)

    async def write(self, tx: Transaction, job: JobRow, contents: Sequence[JsonValue]) -> None:
        """Write the cards."""
        for content in contents:
            assert isinstance(content, dict)
            statement = text("INSERT INTO cards (name, user_id) VALUES (:name, :user_id)")
            await tx.execute(statement, {"name": content["name"], "user_id": job.user_id})


@pytest.fixture
async def jobs(database: Database) -> Jobs:
    async with database.engine.begin() as connection:
        await connection.execute(
            text("CREATE TABLE cards (name VARCHAR(64) PRIMARY KEY, user_id VARCHAR(64) NOT NULL)")
        )
    return Jobs(database, writers={"card": Cards()})


async def cards(jobs: Jobs) -> list[tuple[str, str]]:
    async def work(tx: Transaction) -> list[tuple[str, str]]:
        return [(row.name, row.user_id) for row in await tx.execute(text("SELECT name, user_id FROM cards"))]

    return sorted(await jobs.database.read(work))


def writing(*contents: str, writer: str = "card") -> Succeeded:
    return replace(success(), rows=[BusinessRow(writer=writer, content_json=content) for content in contents])


async def test_rows_come_with_the_success_once(jobs: Jobs) -> None:
    lease = await jobs.running(user_id="user-7")
    result = writing('{"name":"a"}', '{"name":"b","user":"user-7"}')
    for _ in range(2):
        assert isinstance(await jobs.submit(lease, result), Accepted)
    assert await cards(jobs) == [("a", "user-7"), ("b", "user-7")]


async def test_a_row_of_somebody_else_refuses_its_result_and_no_other_of_the_batch(jobs: Jobs) -> None:
    good, bad = await jobs.running(user_id="user-7"), await jobs.running(user_id="user-8")
    results = await jobs.execution.submit(
        "executor-1",
        [
            Outcome(lease=bad, report=writing('{"name":"x"}', '{"name":"y","user":"user-7"}')),
            Outcome(lease=good, report=writing('{"name":"z"}')),
        ],
    )
    assert [type(result) for result in results] == [InvalidInput, Accepted]
    assert await cards(jobs) == [("z", "user-7")]
    assert (await jobs.queries.get(BACKEND, bad.job_id, full=False)).job.lifecycle_status == JobState.RUNNING


async def test_a_conflict_with_another_jobs_row_is_no_success(jobs: Jobs) -> None:
    """Ruling 22: it fails this result, whole, and nobody else's."""
    first, second, third = [await jobs.running() for _ in range(3)]
    assert isinstance(await jobs.submit(first, writing('{"name":"a"}')), Accepted)
    results = await jobs.execution.submit(
        "executor-1",
        [
            Outcome(lease=second, report=writing('{"name":"b"}', '{"name":"a"}')),
            Outcome(lease=third, report=writing('{"name":"c"}')),
        ],
    )
    assert [isinstance(result, Accepted) for result in results] == [False, True]
    assert [name for name, _ in await cards(jobs)] == ["a", "c"]
    assert await jobs.history(second.job_id) == ["created", "locked"]


async def test_what_cannot_be_written_is_named(jobs: Jobs) -> None:
    lease = await jobs.running()
    refusal = await jobs.submit(
        lease,
        replace(
            success(),
            rows=[
                BusinessRow(writer="card", content_json="{"),
                BusinessRow(writer="unheard_of", content_json="{}"),
            ],
        ),
    )
    assert isinstance(refusal, InvalidInput)
    assert {found.field: found.description.partition(":")[0] for found in refusal.violations} == {
        "succeeded.projection.rows[0].content_json": "not JSON",
        "succeeded.projection.rows[1].writer": "no writer 'unheard_of'; known",
    }
    many = await jobs.submit(lease, writing(*['{"name":"a"}'] * (MOST_ROWS + 1)))
    assert isinstance(many, InvalidInput)
    large = await jobs.submit(lease, writing('{"name":"' + "x" * 2 * 1024 * 1024 + '"}'))
    assert isinstance(large, InvalidInput)
    assert await cards(jobs) == []
