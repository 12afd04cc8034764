"""Case D6: times are UTC, whatever the zones of this process and of the database's session, also when clocks change.

A session's zone only matters to statements that ask for local time, and there must be none. So these sessions get New
York's, and their clock is set to moments that an hour too many or too few would show.
"""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import event, insert, select

from services.jobs.migrate import upgrade_with
from services.jobs.store.database import Database, Transaction
from services.jobs.store.tables import jobs as jobs_table
from services.jobs.store.tables import outbox_events, users
from services.jobs.store.time import now, now_plus, to_microseconds
from tests.conformance.conftest import Jobs, lease_of, success

#: New York by its rules, so that no database of zones is needed.
NEW_YORK = "EST5EDT,M3.2.0,M11.1.0"
SPRING, AUTUMN = datetime(2026, 3, 8, 7, tzinfo=UTC), datetime(2026, 11, 1, 6, tzinfo=UTC)
LEASE = timedelta(seconds=60)
MOMENTS = (
    # The hour that New York skips, and a UTC time that is none there.
    datetime(2026, 3, 8, 7, 30, 0, 123456, tzinfo=UTC),
    datetime(2026, 3, 8, 2, 30, 0, 1, tzinfo=UTC),
    # Half past one for the first time, and for the second.
    datetime(2026, 11, 1, 5, 30, 0, 999999, tzinfo=UTC),
    datetime(2026, 11, 1, 6, 30, 0, 999999, tzinfo=UTC),
)


@dataclass
class SetClock:
    """The database's clock, and the zone of whoever reads it."""

    time: datetime = SPRING

    @property
    def zone(self) -> str:
        return "-04:00" if SPRING <= self.time < AUTUMN else "-05:00"


@pytest.fixture(autouse=True)
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process live in New York."""
    monkeypatch.setenv("TZ", NEW_YORK)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def database(database_url: str, clock: SetClock) -> AsyncIterator[Database]:
    await upgrade_with(database_url)
    database = Database(database_url, clock=lambda: clock.time)
    if not database_url.startswith("sqlite"):

        @event.listens_for(database.engine.sync_engine, "checkout")
        def set_clock(connection: Any, _record: Any, _proxy: Any) -> None:
            cursor = connection.cursor()
            seconds = Decimal(to_microseconds(clock.time)) / 1_000_000
            cursor.execute(f"SET time_zone = '{clock.zone}', timestamp = {seconds}")
            cursor.close()

    yield database
    await database.close()


async def test_the_clock_is_utc_and_a_time_comes_back_as_it_was_stored(database: Database, clock: SetClock) -> None:
    for moment in MOMENTS:
        clock.time = moment

        async def work(tx: Transaction, moment: datetime = moment) -> None:
            (row,) = await tx.execute(select(now(), now_plus(LEASE), now_plus(timedelta(hours=-1))))
            assert list(row) == [moment, moment + LEASE, moment - timedelta(hours=1)]
            await tx.execute(insert(users), [{"user_id": f"given {moment}", "created_at": moment}])
            await tx.execute(insert(users).values(user_id=f"now {moment}", created_at=now()))
            found = (await tx.execute(select(users.c.created_at).where(users.c.created_at == moment))).scalars()
            assert list(found) == [moment, moment]

        await database.write(work)


async def test_a_lease_over_a_change_of_the_clocks_is_as_long_as_any(jobs: Jobs, clock: SetClock) -> None:
    for change in (SPRING, AUTUMN):
        before, after = change - LEASE / 2, change + LEASE / 4
        clock.time = before
        job_id = (await jobs.create()).job.job_id
        locked = await jobs.lock(job_id)
        times = (locked.job.created_at, locked.job.started_at, locked.job.lock_until)
        assert (*times, locked.remaining) == (before, before, before + LEASE, LEASE)
        clock.time = after
        # The repeat of a lost answer: the same lease, and what is left of it.
        again = await jobs.lock(job_id, token=locked.job.lease_token)
        assert again.remaining == LEASE / 4
        await jobs.submit(lease_of(locked), success())
        row = next(row for row in await jobs.rows(jobs_table) if row["job_id"] == job_id)
        assert (row["created_at"], row["finished_at"]) == (before, after)
        events = [event for event in await jobs.rows(outbox_events, "id") if event["aggregate_id"] == job_id]
        assert [event["created_at"] for event in events] == [before, after]
