"""Where handlers run: on an event loop of their own, in a thread of its own (EX-11).

Broker, heartbeats and reports live on the main loop. A handler that blocks its loop delays other handlers, but every
lease is renewed all the same.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import structlog

from aijobs.logs import place_of

T = TypeVar("T")

#: How long a cancelled handler may take to end before its run goes on without it.
ABANDON_AFTER = timedelta(seconds=1)
#: How long the handlers' loop may take to answer before somebody is told, and how often it is asked.
BLOCKED_AFTER = timedelta(seconds=3)
WATCH_INTERVAL = timedelta(seconds=1)
log = structlog.get_logger()


class HandlerExit(Exception):
    """A handler ended in a way that would have ended more than itself."""


@dataclass(slots=True, eq=False)
class _Run(Generic[T]):
    """One piece of work on the handlers' loop, and its end on the main loop."""

    work: Callable[[], Coroutine[Any, Any, T]]
    name: str
    main: asyncio.AbstractEventLoop
    done: asyncio.Future[T]
    task: asyncio.Task[T] | None = None
    #: Set before the task is cancelled by us; every other CancelledError is the handler's own affair.
    cancelled: bool = False

    def start(self) -> None:
        """Begin; on the handlers' loop."""
        self.task = asyncio.get_running_loop().create_task(self._contained(), name=self.name)
        self.task.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Cancel; on the handlers' loop."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    async def _contained(self) -> T:
        """Turn every end that is neither ours nor an ordinary failure into a failure of this run.

        A SystemExit would end the thread, and with it every other run; a CancelledError that nobody asked for would
        look as if the engine had cancelled the run.
        """
        try:
            return await self.work()
        except asyncio.CancelledError as error:
            if self.cancelled:
                raise
            raise HandlerExit(place_of(error)) from error
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not self._is_current():
                raise  # Python itself is clearing this coroutine away
            raise HandlerExit(place_of(error)) from error

    def _is_current(self) -> bool:
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:
            return False

    def _finish(self, task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # the main loop is gone; nobody waits any more
            self.main.call_soon_threadsafe(self._copy, task)

    def _copy(self, task: asyncio.Task[T]) -> None:
        if self.done.cancelled():
            return
        if task.cancelled():
            self.done.cancel()
        elif (error := task.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())


class HandlerLoop:
    """Runs coroutines on the handlers' loop from the main loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="handlers", daemon=True)
        self._runs: set[_Run[Any]] = set()
        self._stopping = False
        #: Set while the handlers' loop answers.
        self.responsive = asyncio.Event()

    def start(self) -> None:
        """Start the thread."""
        self.loop.set_exception_handler(log_loop_exception)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised in a task or a callback that a handler had started: it must not take the other runs along.
                log.error("a handler tried to end the process", error=type(error).__name__)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Run `work()` on the handlers' loop and return what it returns.

        Cancelled, it cancels the work and waits for its end, but not longer than a second: a handler that ignores
        its cancellation must not hold up what follows.

        Args:
            work: makes the coroutine; called on the handlers' loop.
            name: of the handler, for the log.

        Raises:
            HandlerExit: the work ended in a way of its own.
            Exception: what the work raises.

        """
        main = asyncio.get_running_loop()
        run = _Run(work, name, main, main.create_future())
        self._runs.add(run)
        run.done.add_done_callback(lambda _: self._runs.discard(run))
        self.post(run.start)
        try:
            return await asyncio.shield(run.done)
        except asyncio.CancelledError:
            if not run.done.done():
                self.post(run.cancel)
                await asyncio.wait({run.done}, timeout=ABANDON_AFTER.total_seconds())
            if not run.done.done():
                log.warning("handler does not end though cancelled; its run goes on without it", handler=name)
            run.done.add_done_callback(_retrieve)
            raise

    async def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel whatever still runs, do `last` on the handlers' loop, and end the thread.

        A handler that blocks the loop is left behind.
        """
        if not self._thread.is_alive():
            return
        runs = list(self._runs)
        asyncio.run_coroutine_threadsafe(self._end(runs, last), self.loop)
        # As long as both steps of the end may take, and some more.
        patience = 3 * ABANDON_AFTER.total_seconds()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, patience)
        if self._thread.is_alive():
            log.warning("a handler blocks its event loop; it ends with the process")
        elif not asyncio.all_tasks(self.loop):
            self.loop.close()

    async def _end(self, runs: Sequence[_Run[Any]], last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        for run in runs:
            run.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABANDON_AFTER.total_seconds())
        if last is not None:
            try:
                async with asyncio.timeout(ABANDON_AFTER.total_seconds()):
                    await last()
            except Exception as error:  # noqa: BLE001 - the thread ends all the same
                log.warning("the handlers' loop did not end in order", error=place_of(error))
        self._stopping = True
        self.loop.stop()

    async def watch(self) -> None:
        """Look after the handlers' loop until cancelled: say who is running when it does not answer (EX-11)."""
        main = asyncio.get_running_loop()
        answered = asyncio.Event()

        def answer() -> None:
            main.call_soon_threadsafe(answered.set)

        while True:
            answered.clear()
            self.post(answer)
            with suppress(TimeoutError):
                async with asyncio.timeout(BLOCKED_AFTER.total_seconds()):
                    await answered.wait()
            if not answered.is_set():
                self.responsive.clear()
                log.error("a handler blocks all others", handlers=sorted({run.name for run in self._runs}))
                await answered.wait()
                log.warning("handlers go on")
            self.responsive.set()
            await asyncio.sleep(WATCH_INTERVAL.total_seconds())

    def post(self, callback: Callable[[], None]) -> None:
        """Call something on the handlers' loop, soon; never, if the process ends first. From any thread."""
        with suppress(RuntimeError):  # the loop has been closed: the process ends
            self.loop.call_soon_threadsafe(callback)


def log_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio complains of, such as a failed task that nobody waits for, without what its message repeats."""
    del loop
    error = context.get("exception")
    log.warning(
        "something that a handler left behind failed",
        what=context.get("message", "")[:80],
        error=place_of(error) if isinstance(error, BaseException) else None,
    )


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at a result that nobody waits for any more, so that asyncio does not complain."""
    if not done.cancelled():
        done.exception()


class HandlerWatch:
    """The loop of the main thread that looks after the handlers' loop."""

    name = "handler watch"

    def __init__(self, handlers: HandlerLoop) -> None:
        self._handlers = handlers

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._handlers.watch()
