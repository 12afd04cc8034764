"""The usage ledger as the gateway sees it, across the two event loops (EX-6, EX-11).

Handlers and gateway live on the handlers' loop; calls to the jobs service belong to the main loop. A call is opened
before it is made: if that cannot be stored, it is not made. A settled row tells of money that is spent: it is sent
until the jobs service has it, and the handler waits for it only a little while.
"""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import structlog

from aijobs.backoff import Backoff
from aijobs.errors import AijobsError
from aijobs.logs import place_of
from services.executor.gateway.ledger import CallOpened, CallSettled
from services.executor.leases import Lease
from services.executor.lifecycle_client import LifecycleClient

#: How long a call waits for its row to be opened before it is given up.
OPEN_WITHIN = timedelta(seconds=6)
#: How long a handler waits for a row to be settled; afterwards it goes on by itself.
SETTLE_WITHIN = timedelta(seconds=2)
log = structlog.get_logger()


class LedgerWriter:
    """Stores rows from the main loop; one for the whole executor."""

    def __init__(self, client: LifecycleClient) -> None:
        self._client = client
        self._unsent: set[asyncio.Task[None]] = set()

    async def open(self, lease: Lease, call: CallOpened) -> None:
        """Store that a call is about to start.

        Raises:
            AijobsError: refused.
            TimeoutError: the jobs service did not answer in time.

        """
        async with asyncio.timeout(OPEN_WITHIN.total_seconds()):
            await self._store(lease, call)

    async def settle(self, lease: Lease, call: CallSettled) -> None:
        """Store how a call ended, now or as soon as the jobs service answers."""
        task = asyncio.ensure_future(self._settle(lease, call))
        self._unsent.add(task)
        task.add_done_callback(self._unsent.discard)
        await asyncio.wait({task}, timeout=SETTLE_WITHIN.total_seconds())

    async def drain(self, within: timedelta) -> None:
        """Give rows that are not stored yet their time, when the executor ends."""
        if not self._unsent:
            return
        _, left = await asyncio.wait(self._unsent, timeout=within.total_seconds())
        for task in left:
            task.cancel()
        if left:
            log.error("usage rows not settled before the end of the process", rows=len(left))
            await asyncio.wait(left)

    async def _settle(self, lease: Lease, call: CallSettled) -> None:
        try:
            await self._store(lease, call)
        except Exception as error:  # noqa: BLE001 - nobody waits for this task: what it lost must be said
            told = error.message if isinstance(error, AijobsError) else place_of(error)
            log.error("usage row not stored", job_id=lease.job_id, call_no=call.opened.call_no, error=told)

    async def _store(self, lease: Lease, call: CallOpened | CallSettled) -> None:
        backoff = Backoff()
        while True:
            try:
                return await self._client.record(lease, call)
            except AijobsError as error:
                if not error.transient:
                    raise
            await backoff.wait()


class RemoteLedger:
    """Implements `services.executor.gateway.ledger.UsageLedger` for one attempt.

    Args:
        writer: stores the rows.
        lease: the attempt.
        main_loop: the loop that the writer belongs to.

    """

    def __init__(self, writer: LedgerWriter, lease: Lease, main_loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._lease = lease
        self._main_loop = main_loop

    async def opened(self, call: CallOpened) -> None:
        """Store that a call is about to start."""
        await self._on_main_loop(self._writer.open(self._lease, call))

    async def settled(self, call: CallSettled) -> None:
        """Store how a call ended."""
        await self._on_main_loop(self._writer.settle(self._lease, call))

    async def _on_main_loop(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._main_loop))
