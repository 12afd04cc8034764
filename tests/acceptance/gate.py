"""A TCP port that can be opened and shut, in front of a server: how a server that comes late or goes away looks."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit, urlunsplit

from deploy.local.ports import LOOPBACK, free_port


class Link:
    """One connection through a gate. A subclass may look at what passes, hold it up, or cut the connection."""

    async def sent(self, data: bytes) -> bool:
        """See what the client sends; False cuts the connection instead of sending it on."""
        return True

    async def answered(self, data: bytes) -> bool:
        """See what the server answers; False cuts the connection instead of sending it on."""
        return True


class Gate:
    """Forwards connections while it is open; while it is shut nothing listens on its port.

    Args:
        url: of the server behind; must have host and port.
        link: makes what sees a connection's traffic.

    """

    def __init__(self, url: str, *, link: Callable[[], Link] = Link) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._behind = (parts.hostname, parts.port)
        self.port = free_port()
        login, _, _ = parts.netloc.rpartition("@")
        #: The server's URL through the gate.
        self.url = urlunsplit(parts._replace(netloc=f"{login}@{LOOPBACK}:{self.port}"))
        self._link = link
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self) -> None:
        """Listen and forward, if it does not yet."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port)

    async def shut(self) -> None:
        """Cut every connection and listen no more."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._clients.values():
            writer.transport.abort()
        if self._clients:
            await asyncio.wait(self._clients)
        await self._server.wait_closed()
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            async with asyncio.timeout(5):
                behind_reader, behind_writer = await asyncio.open_connection(*self._behind)
            link = self._link()
            ways = {
                asyncio.create_task(_copy(reader, behind_writer, link.sent)),
                asyncio.create_task(_copy(behind_reader, writer, link.answered)),
            }
            # An end on one side ends both.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            behind_writer.transport.abort()
            writer.transport.abort()
            for way in ways:
                # A link may be holding something up.
                way.cancel()
            await asyncio.wait(ways)
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            del self._clients[task]


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[bytes], Awaitable[bool]]
) -> None:
    with contextlib.suppress(OSError):
        while (data := await reader.read(65536)) and await passes(data):
            writer.write(data)
            await writer.drain()
