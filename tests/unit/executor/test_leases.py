"""How a run is told to stop."""

import asyncio
from datetime import timedelta

import pytest

from services.executor.leases import RunStopped, StopReason, StopSwitch


async def never() -> None:
    await asyncio.Event().wait()


async def test_work_that_nobody_stops_is_done() -> None:
    async def work() -> int:
        return 1

    assert await StopSwitch().guard(work()) == 1


async def test_a_stop_cancels_the_work_and_says_why() -> None:
    switch = StopSwitch()
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await never()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    guarded = asyncio.create_task(switch.guard(work()))
    await started.wait()
    switch.stop(StopReason.CANCEL_REQUESTED)
    with pytest.raises(RunStopped) as stopped:
        await guarded
    assert stopped.value.reason == StopReason.CANCEL_REQUESTED
    assert cancelled.is_set()


async def test_a_stop_before_the_work_prevents_it() -> None:
    switch = StopSwitch()
    switch.stop(StopReason.CANCEL_REQUESTED)
    with pytest.raises(RunStopped):
        await switch.guard(never())


async def test_a_stop_ends_a_wait() -> None:
    switch = StopSwitch()
    sleeping = asyncio.create_task(switch.sleep(timedelta(hours=1)))
    switch.stop(StopReason.CANCEL_REQUESTED)
    with pytest.raises(RunStopped):
        await sleeping


@pytest.mark.parametrize(
    ("reasons", "stands"),
    [
        ([StopReason.CANCEL_REQUESTED, StopReason.CANCEL_REQUESTED], StopReason.CANCEL_REQUESTED),
        ([StopReason.LEASE_LOST, StopReason.CANCEL_REQUESTED], StopReason.LEASE_LOST),
        ([StopReason.CANCEL_REQUESTED, StopReason.LEASE_LOST], StopReason.LEASE_LOST),
    ],
)
async def test_the_first_reason_stands_but_a_lost_lease_wins(reasons: list[StopReason], stands: StopReason) -> None:
    switch = StopSwitch()
    for reason in reasons:
        switch.stop(reason)
    assert switch.reason == stands


async def test_a_failure_of_the_work_passes() -> None:
    async def work() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await StopSwitch().guard(work())


async def test_cancelling_the_guard_cancels_the_work_and_waits_for_its_end() -> None:
    ended = asyncio.Event()
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await never()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)  # ending takes a moment
            ended.set()

    guarded = asyncio.create_task(StopSwitch().guard(work()))
    await started.wait()
    guarded.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guarded
    assert ended.is_set()
