"""How a service process lives: it starts, runs until it is told to stop or a loop of it breaks, and ends cleanly.

    SIGTERM or SIGINT, first   ─▶ `stop` is set; `main` ends its work and returns             exit status 0
    SIGTERM or SIGINT, second  ─▶ the process ends at once                                    128 + signal
    a background loop breaks   ─▶ a log line names it, `stop` is set, `main` ends its work    1
    either raises `CannotRun`  ─▶ a log line says why and what to do                          1
    `main` raises              ─▶ a log line with the traceback                               1

A service that lost a loop is worth nothing but looks alive; whoever started the process starts it again.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

_log = structlog.stdlib.get_logger("aijobs.service")


class Loop(Protocol):
    """Background work: a relay, a reaper, a heartbeat."""

    @property
    def name(self) -> str:
        """Name for the log."""
        ...

    async def run(self) -> None:
        """Work until cancelled, then clean up and let the CancelledError pass. Returning is a fault."""
        ...


class CannotRun(Exception):
    """What the service was given to stand on is not usable: an address, a schema, a queue.

    No bug, so nobody reads a traceback of it; the message says what is wrong and what to do.
    """


class BrokenLoopError(Exception):
    """A background loop ended by itself. The log says why."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the loop {name!r} ended by itself")
        self.name = name


@asynccontextmanager
async def background(stop: asyncio.Event, *loops: Loop) -> AsyncIterator[None]:
    """Run loops beside the block, and cancel them and wait for their end when it is left.

    Args:
        stop: set when a loop breaks, so that the block comes to its end.
        loops: what to run.

    Raises:
        BrokenLoopError: after the block, if a loop broke.
        CannotRun: after the block, if a loop raised it.

    """
    broken: list[CannotRun | BrokenLoopError] = []

    async def watch(loop: Loop) -> None:
        reason: CannotRun | BrokenLoopError = BrokenLoopError(loop.name)
        try:
            await loop.run()
            _log.error("a background loop returned", loop=loop.name)
        except CannotRun as error:
            reason = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: it came from within, and the loop is no more.
            _log.exception("a background loop was cancelled from within", loop=loop.name)
        except Exception:  # noqa: BLE001 - whatever it is, the process must end and say so
            _log.exception("a background loop broke", loop=loop.name)
        broken.append(reason)
        stop.set()

    tasks = [asyncio.create_task(watch(loop), name=loop.name) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if broken:
        raise broken[0]


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a service until it ends and return the exit status of its process. See the head of this module.

    Args:
        main: runs the service until the event is set, ends its work and returns.

    """
    return asyncio.run(_run(main))


async def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stop = asyncio.Event()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 1:
            _log.warning("stopping at once", signal=number.name)
            os._exit(128 + number)
        _log.info("stopping", signal=number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    except BrokenLoopError as error:
        _log.error("the service ends", broken_loop=error.name)
        return 1
    except CannotRun as error:
        _log.error("the service cannot run", why=str(error))
        return 1
    except Exception:  # noqa: BLE001 - the last frame of the process: it is logged and the status says so
        _log.exception("the service failed")
        return 1
    _log.info("stopped")
    return 0
