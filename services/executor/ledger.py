"""The usage ledger as the gateway sees it, across the two event loops (EX-6, EX-11).

Handlers and gateway live on the handlers' loop; calls to the jobs service belong to the main loop.
"""

import asyncio

from aijobs.backoff import Backoff
from aijobs.errors import AijobsError
from services.executor.gateway.ledger import CallOpened, CallSettled
from services.executor.leases import Lease
from services.executor.lifecycle_client import LifecycleClient

#: Tries of one row before the handler hears of it; with their pauses about six seconds.
TRIES = 7


class RemoteLedger:
    """Implements `services.executor.gateway.ledger.UsageLedger` for one attempt.

    Args:
        client: the jobs service.
        lease: the attempt.
        main_loop: the loop that the client belongs to.

    """

    def __init__(self, client: LifecycleClient, lease: Lease, main_loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._lease = lease
        self._main_loop = main_loop

    async def opened(self, call: CallOpened) -> None:
        """Store that a call is about to start."""
        await self._store(call)

    async def settled(self, call: CallSettled) -> None:
        """Store how a call ended."""
        await self._store(call)

    async def _store(self, call: CallOpened | CallSettled) -> None:
        future = asyncio.run_coroutine_threadsafe(self._with_retries(call), self._main_loop)
        await asyncio.wrap_future(future)

    async def _with_retries(self, call: CallOpened | CallSettled) -> None:
        backoff = Backoff()
        for attempt in range(1, TRIES + 1):
            try:
                return await self._client.record(self._lease, call)
            except AijobsError:
                if attempt == TRIES:
                    raise
            await backoff.wait()
        return None
