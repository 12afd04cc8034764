"""What an executor holds while it runs a job, and how a run is told to stop."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

import structlog

from aijobs.job_type import EarlierError

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to report about one attempt of a job; shown with every report (LC-5)."""

    job_id: str
    attempt: int
    lease_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedJob:
    """A lease and what is needed to run the job."""

    lease: Lease
    job_type: str
    user_id: str
    #: First job of the chain that the job belongs to; the session of its runs (HA-8).
    root_job_id: str
    #: How many jobs came before it in its chain of follow-ups.
    depth: int
    #: How often executors were lost with the job in hand.
    takeovers: int
    snapshot_json: str
    earlier_errors: Sequence[EarlierError]
    #: By this process's monotonic clock: until then the run may take, all its executions and waits together (EX-4).
    run_until: float
    #: By this process's monotonic clock: without a renewal until then, the run has to stop (LC-6).
    abort_at: float


class StopReason(StrEnum):
    """Why a run has to stop before it is done."""

    #: Somebody cancelled the job: confirm it.
    CANCEL_REQUESTED = "cancel_requested"
    #: Another attempt owns the job: report nothing.
    LEASE_LOST = "lease_lost"
    #: This process ends: give the run back.
    SHUTTING_DOWN = "shutting_down"


class RunStopped(Exception):
    """A run was told to stop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class StopSwitch:
    """Tells one run to stop. The first reason stands, except that a lost lease always wins: it forbids reporting."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._lost = asyncio.Event()
        self._told: Callable[[StopReason], object] | None = None
        self.reason: StopReason | None = None

    @contextmanager
    def telling(self, told: Callable[[StopReason], object]) -> Iterator[None]:
        """Have somebody told, within the block, that the run has to stop; at once if it has to already."""
        self._told = told
        if self.reason is not None:
            told(self.reason)
        try:
            yield
        finally:
            self._told = None

    def stop(self, reason: StopReason) -> None:
        """Stop the run."""
        if self.reason is None or reason == StopReason.LEASE_LOST:
            self.reason = reason
        self._stopped.set()
        if reason == StopReason.LEASE_LOST:
            self._lost.set()
        if self._told is not None:
            self._told(reason)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that is cancelled when the run has to stop.

        Raises:
            RunStopped: it had to.

        """
        task = await _until(self._stopped, work)
        if self.reason is None:
            return task.result()
        _retrieve(task)
        raise RunStopped(self.reason)

    async def while_held(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that only a lost lease stops: reporting.

        Raises:
            RunStopped: the lease was lost before the work was done.

        """
        task = await _until(self._lost, work)
        if task.cancelled():
            raise RunStopped(StopReason.LEASE_LOST)
        return task.result()

    async def sleep(self, span: timedelta) -> None:
        """Wait, unless the run has to stop.

        Raises:
            RunStopped: it had to.

        """
        await self.guard(asyncio.sleep(span.total_seconds()))


@dataclass(slots=True, eq=False)
class Beat:
    """One run among those whose leases are renewed: its switch, and its progress on the way to users."""

    lease: Lease
    switch: StopSwitch
    on_progress: Callable[[], None]
    progress: int | None = None
    #: Set while the outcome is being reported: a refused renewal then only means that the report was quicker.
    reporting: bool = False
    _timer: asyncio.TimerHandle | None = None

    def abort_at(self, moment: float) -> None:
        """Stop the run at a time of the loop's clock, unless a renewal sets a later one (LC-6)."""
        self.settle()
        self._timer = asyncio.get_running_loop().call_at(moment, self._abort)

    def settle(self) -> None:
        """Forget the time at which the run would have to stop."""
        if self._timer is not None:
            self._timer.cancel()

    def _abort(self) -> None:
        log.warning("lease not renewed in time; the run stops", job_id=self.lease.job_id, attempt=self.lease.attempt)
        self.switch.stop(StopReason.LEASE_LOST)

    def report_progress(self, percent: int) -> None:
        """Note how far the run is; the next renewal carries it."""
        self.progress = percent
        self.on_progress()


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Do work until it is done or an event comes; the work is over when this returns, whoever ends it."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task


def _retrieve(task: asyncio.Future[Any]) -> None:
    if task.done() and not task.cancelled():
        task.exception()
