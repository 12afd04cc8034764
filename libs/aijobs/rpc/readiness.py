"""Readiness that follows what a service really does."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from aijobs.rpc.server import RpcServer

#: How often a service that works is looked at; a start is noticed at once.
INTERVAL = timedelta(milliseconds=500)


class Readiness:
    """A loop that keeps a server's readiness equal to a set of conditions."""

    name = "readiness"

    def __init__(self, server: RpcServer, *conditions: asyncio.Event) -> None:
        self._server = server
        self._conditions: Sequence[asyncio.Event] = conditions

    async def run(self) -> None:
        """Follow the conditions until cancelled, then be not ready: ready while all of them are set."""
        try:
            await self._follow()
        finally:
            await self._server.set_ready(False)

    async def _follow(self) -> None:
        ready = False
        while True:
            for condition in self._conditions:
                if not ready:
                    await condition.wait()
            holds = all(condition.is_set() for condition in self._conditions)
            if holds != ready:
                ready = holds
                await self._server.set_ready(ready)
            if ready:
                await asyncio.sleep(INTERVAL.total_seconds())
