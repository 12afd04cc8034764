"""Where handlers run: on an event loop of their own, in a thread of its own (EX-11).

Broker, heartbeats and reports live on the main loop. A handler that blocks its loop delays other handlers, but every
lease is renewed all the same.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

#: How long a cancelled handler may take to end before its run goes on without it.
ABANDON_AFTER = timedelta(seconds=1)
log = structlog.get_logger()


class HandlerLoop:
    """Runs coroutines on the handlers' loop from the main loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="handlers", daemon=True)
        self._stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised in a task or a callback that a handler had started: it must not take the other runs along.
                log.error("a handler tried to end the process", error=type(error).__name__)

    async def run(
        self, work: Callable[[], Coroutine[Any, Any, T]], name: str, *, before_cancel: Callable[[], None] | None = None
    ) -> T:
        """Run `work()` on the handlers' loop and return what it returns.

        Cancelled, it cancels the work and waits for its end, but not longer than a second: a handler that ignores
        its cancellation must not hold up what follows.

        Args:
            work: makes the coroutine; called on the handlers' loop.
            name: of the handler, for the log.
            before_cancel: called first when the work is cancelled.

        Raises:
            Exception: what the work raises.

        """
        main = asyncio.get_running_loop()
        done: asyncio.Future[T] = main.create_future()
        task: list[asyncio.Task[T]] = []

        def finish(finished: asyncio.Task[T]) -> None:
            main.call_soon_threadsafe(_copy, finished, done)

        def start() -> None:
            task.append(self._loop.create_task(_contained(work), name=name))
            task[0].add_done_callback(finish)

        def cancel() -> None:
            task[0].cancel()

        self._loop.call_soon_threadsafe(start)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if before_cancel is not None:
                before_cancel()
            if not done.done():
                self._loop.call_soon_threadsafe(cancel)
                await asyncio.wait({done}, timeout=ABANDON_AFTER.total_seconds())
            if not done.done():
                log.warning("handler does not end though cancelled; its run goes on without it", handler=name)
            done.add_done_callback(_retrieve)
            raise

    async def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel whatever still runs, do `last` on the handlers' loop, and end the thread.

        A handler that blocks the loop is left behind.
        """
        if not self._thread.is_alive():
            return
        self._stopping = True
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, ABANDON_AFTER.total_seconds())
        if self._thread.is_alive():
            log.warning("a handler blocks its event loop; it ends with the process")
        else:
            self._loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        half = ABANDON_AFTER.total_seconds() / 2
        if tasks:
            await asyncio.wait(tasks, timeout=half)
        if last is not None:
            await asyncio.wait({asyncio.ensure_future(last())}, timeout=half)
        self._loop.stop()


class HandlerExit(Exception):
    """A handler ended in a way that would have ended more than itself."""


async def _contained(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Turn every end that is not ours into a failure of this run.

    A SystemExit would end the thread, and with it every other run; a CancelledError that nobody asked for (of an inner
    task that the handler itself cancelled) would look as if the engine had cancelled the run.
    """
    task = asyncio.current_task()
    try:
        return await work()
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise HandlerExit(type(error).__name__) from error
    except Exception:
        raise
    except BaseException as error:
        raise HandlerExit(type(error).__name__) from error


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at a result that nobody waits for any more, so that asyncio does not complain."""
    if not done.cancelled():
        done.exception()


def _copy(finished: asyncio.Task[T], done: asyncio.Future[T]) -> None:
    """Hand the end of a task on the handlers' loop to a future on the main loop."""
    if done.cancelled():
        return
    if finished.cancelled():
        done.cancel()
    elif (error := finished.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(finished.result())
