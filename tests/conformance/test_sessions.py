"""Sessions of executors: quick to notice that one is gone, never wrong about one that is there (LC-8)."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from aijobs.errors import ExecutorNotFound, LeaseConflict, LeaseLost, SessionLost, ShuttingDown
from services.jobs.execution import Accepted, Released
from services.jobs.leasing import Extended, Holder, Locked, LockRequest
from services.jobs.sessions import CancelRun, Drain, Session, Verdict
from services.jobs.store.database import Transaction
from services.jobs.store.executors import QueueLoad
from tests.acceptance.waiting import until
from tests.conformance.conftest import Jobs, hello, lease_of, success

GRACE = timedelta(milliseconds=150)


@pytest.fixture
async def quick(jobs: Jobs) -> AsyncIterator[Jobs]:
    quick = Jobs(jobs.database, session_grace=GRACE)
    yield quick
    quick.sessions.stop()


async def settled(jobs: Jobs) -> None:
    """Wait until nobody is suspected any more."""
    async with asyncio.timeout(10):
        await asyncio.gather(*jobs.sessions._suspicions, return_exceptions=True)


async def executor(jobs: Jobs, executor_id: str = "executor-1"):
    (status,) = [s for s in await jobs.operating.executors() if s.executor.executor_id == executor_id]
    return status.executor


async def test_every_hello_begins_a_session_with_a_higher_epoch(jobs: Jobs) -> None:
    epochs = [(await jobs.sessions.open(hello("executor-1"))).epoch for _ in range(3)]
    assert epochs == sorted(set(epochs))
    assert (await jobs.sessions.open(hello("executor-2"))).epoch == 1


async def test_of_hellos_at_once_the_latest_is_heard_and_no_two_get_one_epoch(jobs: Jobs) -> None:
    await jobs.sessions.open(hello("executor-1"))
    hellos = [hello("executor-1") for _ in range(10)]
    results = await asyncio.gather(*map(jobs.sessions.open, hellos), return_exceptions=True)
    epochs = [result.epoch for result in results if isinstance(result, Session)]
    assert len(set(epochs)) == len(epochs)
    assert isinstance(latest := results[-1], Session)
    assert latest.epoch == max(epochs)
    assert all(isinstance(result, Session | SessionLost) for result in results)


async def test_the_leases_of_an_executor_that_does_not_come_back_lapse_after_the_grace(quick: Jobs) -> None:
    leases = [await quick.running() for _ in range(3)]
    other = lease_of(await quick.lock((await quick.create()).job.job_id, executor_id="executor-2"))
    quick.sessions.close(quick.opened["executor-1"])
    await settled(quick)
    assert [await quick.history(lease.job_id) for lease in leases] == [["created", "locked", "lapsed"]] * 3
    assert [isinstance(await quick.submit(lease, success()), LeaseLost) for lease in leases] == [True] * 3
    assert isinstance(await quick.submit(other, success(), "executor-2"), Accepted)
    assert (await executor(quick)).lost_at is not None


async def test_a_late_lock_of_a_lost_executor_locks_nothing(quick: Jobs) -> None:
    """It was sent before its process died and arrives after its leases have lapsed."""
    holder = await quick.holder()
    job_id = (await quick.create()).job.job_id
    quick.sessions.close(quick.opened["executor-1"])
    await settled(quick)
    (refused,) = await quick.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token="t" * 32)])
    assert isinstance(refused, SessionLost)
    assert await quick.history(job_id) == ["created"]


@pytest.mark.parametrize(
    "holder", [Holder(executor_id="executor-1", session_epoch=9), Holder(executor_id="nobody", session_epoch=1)]
)
async def test_only_the_present_session_locks(jobs: Jobs, holder: Holder) -> None:
    await jobs.holder("executor-1")
    job_id = (await jobs.create()).job.job_id
    results = await jobs.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token="t" * 32)] * 2)
    assert [type(result) for result in results] == [SessionLost] * 2


async def test_an_executor_that_comes_back_within_the_grace_keeps_its_leases(quick: Jobs) -> None:
    """Also at another replica: what counts is the row."""
    elsewhere = Jobs(quick.database, session_grace=GRACE)
    lease = await quick.running()
    quick.sessions.close(quick.opened["executor-1"])
    again = await elsewhere.sessions.open(hello("executor-1"))
    await settled(quick)
    assert again.epoch == quick.opened["executor-1"].epoch + 1
    assert isinstance(await quick.submit(lease, success()), Accepted)
    assert (await executor(quick)).lost_at is None


@pytest.mark.parametrize("call", ["extend", "submit"])
async def test_a_successful_report_is_a_sign_of_life(quick: Jobs, call: str) -> None:
    """The stream is cut for good, calls get through: whoever calls is there."""
    lease, finished = await quick.running(), await quick.running()
    await quick.sessions._disconnect(quick.opened["executor-1"])
    match call:
        case "extend":
            await quick.extend(lease)
        case "submit":
            await quick.submit(finished, success())
    assert await quick.sessions._judge(quick.opened["executor-1"]) is Verdict.THERE
    assert isinstance(await quick.extend(lease), Extended)


async def test_signs_of_life_are_stored_at_most_once_a_second(jobs: Jobs) -> None:
    lease = await jobs.running()
    before = (await executor(jobs)).seen_at
    for _ in range(5):
        await jobs.extend(lease)
    assert (await executor(jobs)).seen_at == before


async def test_a_look_that_comes_late_gives_another_grace(jobs: Jobs) -> None:
    """Case L8: the database was away, so nobody could come back; that is no sign of death."""
    lease = await jobs.running()
    session = jobs.opened["executor-1"]
    await jobs.sessions._disconnect(session)
    await age(jobs, "disconnected_at", seconds=3)
    await age(jobs, "seen_at", seconds=4)
    assert await jobs.sessions._judge(session) is Verdict.TOO_LATE
    assert isinstance(await jobs.submit(lease, success()), Accepted)


async def test_a_session_that_is_no_longer_the_present_one_is_no_reason_for_suspicion(jobs: Jobs) -> None:
    old = await jobs.sessions.open(hello("executor-1"))
    await jobs.sessions.open(hello("executor-1"))
    assert not await jobs.sessions._disconnect(old)
    assert (await executor(jobs)).disconnected_at is None


async def test_a_new_session_between_the_break_and_the_look_ends_the_suspicion(jobs: Jobs) -> None:
    old = await jobs.sessions.open(hello("executor-1"))
    await jobs.sessions._disconnect(old)
    new = await jobs.sessions.open(hello("executor-1"))
    await jobs.sessions._disconnect(new)
    assert await jobs.sessions._judge(old) is Verdict.THERE


async def test_a_replica_that_stops_suspects_nobody_and_takes_no_session(quick: Jobs) -> None:
    lease = await quick.running()
    quick.sessions.stop()
    quick.sessions.close(quick.opened["executor-1"])
    await settled(quick)
    assert (await executor(quick)).disconnected_at is None
    assert isinstance(await quick.submit(lease, success()), Accepted)
    with pytest.raises(ShuttingDown):
        await quick.sessions.open(hello("executor-3"))


async def test_a_late_hello_is_refused_and_costs_the_present_session_nothing(jobs: Jobs) -> None:
    """It comes from a stream that was given up, after that of the stream that is used."""
    late, present = hello("executor-1"), hello("executor-1")
    session = await jobs.sessions.open(present)
    for _ in range(2):
        with pytest.raises(SessionLost):
            await jobs.sessions.open(late)
    with pytest.raises(SessionLost):
        await jobs.sessions.open(present)
    assert (await executor(jobs)).session_epoch == session.epoch


async def test_a_stream_that_breaks_before_its_session_is_open_is_closed_when_it_is(
    quick: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    write = quick.database.write

    async def held_up(work: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await write(work)

    monkeypatch.setattr(quick.database, "write", held_up)
    opening = asyncio.create_task(quick.sessions.open(hello("executor-1")))
    await begun.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    go_on.set()
    await until(lambda: quick.sessions._suspicions, "the close of the session")
    await settled(quick)
    assert (await executor(quick)).lost_at is not None


async def test_a_lock_while_the_session_is_broken_is_refused_and_no_sign_of_life(jobs: Jobs) -> None:
    """It may be the late call of a process that is gone: nobody would know of its lease."""
    lease = await jobs.running()
    job_id = (await jobs.create()).job.job_id
    holder, session = await jobs.holder(), jobs.opened["executor-1"]
    await jobs.sessions._disconnect(session)
    (refused,) = await jobs.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token="t" * 32)])
    assert isinstance(refused, SessionLost)
    assert await jobs.sessions._judge(session) is Verdict.LOST
    assert await jobs.history(lease.job_id) == ["created", "locked", "lapsed"]


async def test_a_late_copy_of_a_lock_gives_no_lease_a_second_time(jobs: Jobs) -> None:
    """The lease was had and handed back; whoever had it does not wait for an answer any more."""
    token = "t" * 32
    job_id = (await jobs.create()).job.job_id
    lease = lease_of(await jobs.lock(job_id, token))
    assert isinstance(await jobs.try_lock(job_id, token), Locked), "a repeat while it holds"
    await jobs.submit(lease, Released(reason="shutting down"))
    assert isinstance(await jobs.try_lock(job_id, token), LeaseConflict)
    assert isinstance(await jobs.try_lock(job_id, "u" * 32), Locked)
    assert isinstance(await jobs.try_lock(job_id, token), LeaseConflict)


async def test_locks_race_with_the_loss_of_their_session(jobs: Jobs) -> None:
    """Whatever was locked before the loss lapses with it; nothing is locked afterwards."""
    ids = [(await jobs.create()).job.job_id for _ in range(20)]
    holder = await jobs.holder()
    session = jobs.opened["executor-1"]
    await jobs.sessions._disconnect(session)
    await age(jobs, "disconnected_at", seconds=0.001)
    results = await asyncio.gather(
        *(jobs.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token="t" * 32)]) for job_id in ids[:10]),
        jobs.sessions._judge(session),
        *(jobs.leasing.lock(holder, [LockRequest(job_id=job_id, lease_token="t" * 32)]) for job_id in ids[10:]),
    )
    lost = results[10] is Verdict.LOST
    held = [history for history in [await jobs.history(job_id) for job_id in ids] if history[-1] == "locked"]
    assert not (lost and held)


async def test_a_cancel_is_told_to_the_session_of_the_executor_that_runs_the_job(jobs: Jobs) -> None:
    mine, other = (
        await jobs.running(),
        lease_of(await jobs.lock((await jobs.create()).job.job_id, executor_id="executor-2")),
    )
    telling = asyncio.create_task(jobs.sessions.run())
    await jobs.cancel(mine.job_id)
    assert await told(jobs.opened["executor-1"]) == CancelRun(job_id=mine.job_id, attempt=1)
    assert jobs.opened["executor-2"].commands.empty()
    await jobs.cancel(other.job_id)
    assert await told(jobs.opened["executor-2"]) == CancelRun(job_id=other.job_id, attempt=1)
    assert jobs.opened["executor-1"].commands.empty()
    telling.cancel()


async def test_a_cancel_at_another_replica_is_told_within_a_second(jobs: Jobs) -> None:
    elsewhere = Jobs(jobs.database)
    lease = await jobs.running()
    telling = asyncio.create_task(jobs.sessions.run())
    await elsewhere.cancel(lease.job_id)
    async with asyncio.timeout(1):
        assert await told(jobs.opened["executor-1"]) == CancelRun(job_id=lease.job_id, attempt=1)
    telling.cancel()


async def test_a_cancel_is_told_again_to_a_new_session(jobs: Jobs) -> None:
    lease = await jobs.running()
    telling = asyncio.create_task(jobs.sessions.run())
    await jobs.cancel(lease.job_id)
    await told(jobs.opened["executor-1"])
    again = await jobs.sessions.open(hello("executor-1"))
    assert await told(again) == CancelRun(job_id=lease.job_id, attempt=1)
    telling.cancel()


async def test_an_executor_is_drained_on_an_operators_word(jobs: Jobs) -> None:
    await jobs.holder("executor-1")
    telling = asyncio.create_task(jobs.sessions.run())
    status = await jobs.operating.drain("ops", "executor-1")
    assert status.executor.drain_requested_at is not None
    assert await told(jobs.opened["executor-1"]) == Drain()
    first = (await executor(jobs)).drain_requested_at
    await jobs.operating.drain("ops", "executor-1")
    assert (await executor(jobs)).drain_requested_at == first
    with pytest.raises(ExecutorNotFound):
        await jobs.operating.drain("ops", "nobody")
    telling.cancel()


async def test_executors_are_listed_with_what_they_said_and_what_they_hold(jobs: Jobs) -> None:
    await jobs.running()
    load = QueueLoad(queue="ai-interactive", slots=4, free_slots=3, idle=timedelta(seconds=12.5))
    await jobs.sessions.report(jobs.opened["executor-1"], [load])
    (status,) = await jobs.operating.executors()
    assert status.running == 1
    assert (status.executor.version, status.executor.queues) == ("1.0.0", [load])
    assert "testing" in status.executor.job_types


async def test_a_report_of_an_earlier_session_changes_nothing(jobs: Jobs) -> None:
    old = await jobs.sessions.open(hello("executor-1"))
    await jobs.sessions.open(hello("executor-1"))
    await jobs.sessions.report(old, [])
    assert len((await executor(jobs)).queues) == 1


async def told(session: Session) -> object:
    """Wait for the next command of a session."""
    async with asyncio.timeout(5):
        return await session.commands.get()


async def age(jobs: Jobs, column: str, *, seconds: float) -> None:
    """Move a time of every executor into the past."""

    async def work(tx: Transaction) -> None:
        past = f"{column} - {int(seconds * 1e6)}" if tx.sqlite else f"{column} - INTERVAL {seconds} SECOND"
        await tx.execute(text(f"UPDATE executors SET {column} = {past}"))

    await jobs.database.write(work)


async def test_a_goodbye_ends_what_was_not_given_back_and_suspects_nobody(jobs: Jobs) -> None:
    lease = await jobs.running()
    holder = await jobs.holder()
    await jobs.sessions.leave(jobs.opened["executor-1"])
    assert await jobs.history(lease.job_id) == ["created", "locked", "lapsed"]
    assert [status.executor.executor_id for status in await jobs.operating.executors()] == []
    (late,) = await jobs.leasing.lock(holder, [LockRequest(job_id=lease.job_id, lease_token="t" * 32)])
    assert isinstance(late, SessionLost)


async def test_a_late_report_of_a_broken_session_is_no_sign_of_life(jobs: Jobs) -> None:
    await jobs.running()
    session = jobs.opened["executor-1"]
    await jobs.sessions._disconnect(session)
    await jobs.sessions.report(session, [])
    assert await jobs.sessions._judge(session) is Verdict.LOST
