"""EX-11: handlers run on a loop of their own, and nothing they do holds up the main loop."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.executor import handlers
from services.executor.handlers import HandlerExit, HandlerLoop


@pytest.fixture
async def loop() -> AsyncIterator[HandlerLoop]:
    loop = HandlerLoop()
    loop.start()
    async with asyncio.timeout(20):
        yield loop
    await loop.stop()


async def test_work_runs_in_another_thread_and_its_result_comes_back(loop: HandlerLoop) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    assert await loop.run(work, "work") != threading.get_ident()


async def test_a_failure_comes_back(loop: HandlerLoop) -> None:
    async def work() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await loop.run(work, "work")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_a_handler_cannot_end_the_process_or_the_thread(loop: HandlerLoop, error: BaseException) -> None:
    async def work() -> None:
        raise error

    async def other() -> int:
        return 1

    with pytest.raises(HandlerExit):
        await loop.run(work, "leaving")
    assert await loop.run(other, "other") == 1


async def test_a_cancelled_error_of_the_handlers_own_is_its_failure(loop: HandlerLoop) -> None:
    """An inner task that the handler itself cancelled; nobody cancelled the run."""

    async def work() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    with pytest.raises(HandlerExit):
        await loop.run(work, "work")


async def test_a_handler_that_cancels_its_own_task_fails_too(loop: HandlerLoop) -> None:
    """Its task then counts a cancellation, but none of ours."""

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(HandlerExit):
        await loop.run(work, "work")


async def test_a_task_of_a_handler_cannot_end_the_thread_either(loop: HandlerLoop) -> None:
    async def child() -> None:
        raise SystemExit(3)

    async def work() -> None:
        await asyncio.gather(child())

    async def other() -> int:
        return 1

    with pytest.raises(HandlerExit):
        await loop.run(work, "leaving")
    assert await loop.run(other, "other") == 1


async def test_what_is_no_coroutine_function_fails_and_does_not_hang(loop: HandlerLoop) -> None:
    def broken() -> Any:
        raise LookupError("before any await")

    with pytest.raises(LookupError):
        await loop.run(broken, "broken")
    with pytest.raises(TypeError):
        await loop.run(lambda: 1, "no coroutine")  # type: ignore[arg-type, return-value]  # the point


async def test_cancelling_reaches_the_work_and_waits_for_its_end(loop: HandlerLoop) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a moment
            ended.set()

    running = asyncio.create_task(loop.run(work, "work"))
    await asyncio.to_thread(started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_work_that_ignores_its_cancellation_is_left_behind(loop: HandlerLoop, monkeypatch) -> None:
    monkeypatch.setattr(handlers, "ABANDON_AFTER", handlers.ABANDON_AFTER / 10)
    started, release = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    running = asyncio.create_task(loop.run(work, "stubborn"))
    await asyncio.to_thread(started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    release.set()


async def test_blocking_work_does_not_block_the_main_loop(loop: HandlerLoop) -> None:
    started, release = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        release.wait()

    running = asyncio.create_task(loop.run(work, "blocking"))
    await asyncio.to_thread(started.wait)
    before = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - before < 1
    release.set()
    await running


async def test_stopping_ends_what_still_runs() -> None:
    loop = HandlerLoop()
    loop.start()
    ended = threading.Event()
    started = threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(loop.run(work, "work"))
    await asyncio.to_thread(started.wait)
    closed: list[str] = []

    async def close() -> None:
        closed.append(threading.current_thread().name)

    await loop.stop(close)
    assert ended.is_set()
    assert closed == ["handlers"], "what belongs to the handlers' loop is closed there"
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_handler_that_blocks_the_loop_is_named_and_noticed_and_so_is_its_end(
    loop: HandlerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EX-11."""
    for name in ("BLOCKED_AFTER", "WATCH_INTERVAL"):
        monkeypatch.setattr(handlers, name, timedelta(milliseconds=20))
    release, started = threading.Event(), threading.Event()

    async def block() -> None:
        started.set()
        release.wait()

    with capture_logs() as logs:
        watching = asyncio.create_task(loop.watch())
        await loop.responsive.wait()
        blocking = asyncio.create_task(loop.run(block, "blocker"))
        await asyncio.to_thread(started.wait)
        while not logs:  # noqa: ASYNC110 - the log is the signal
            await asyncio.sleep(0.005)
        assert not loop.responsive.is_set()
        release.set()
        await loop.responsive.wait()
        await blocking
    assert logs[0]["handlers"] == ["blocker"]
    watching.cancel()


async def test_what_a_handler_leaves_behind_is_logged_without_its_words(loop: HandlerLoop) -> None:
    """AP-6: asyncio's own complaint repeats the exception's message."""

    async def left_behind() -> None:
        raise ValueError("the learner wrote this")

    async def work() -> None:
        task = asyncio.create_task(left_behind())
        await asyncio.wait({task})
        del task
        gc.collect()

    with capture_logs() as logs:
        await loop.run(work, "work")
    (entry,) = logs
    assert "the learner wrote this" not in str(entry)
    assert "ValueError" in entry["error"]
