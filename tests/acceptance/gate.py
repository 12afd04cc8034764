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

    async def ended(self) -> None:
        """Hear that one side has closed its connection; the other is closed when this returns."""


class Network:
    """Where links lead through that can be cut without either side hearing of it.

    A connection that was open then stays dead after the mend, as when a host or a router on the way has forgotten it.
    """

    def __init__(self) -> None:
        self._wires: list[_Wire] = []
        self._is_cut = False

    def link(self) -> Link:
        """Make a link that leads through here."""
        wire = _Wire()
        wire.dead = self._is_cut
        self._wires.append(wire)
        return wire

    def cut(self) -> None:
        """Let nothing through, also of connections that begin now."""
        self._is_cut = True
        for wire in self._wires:
            wire.dead = True

    def mend(self) -> None:
        """Let new connections through."""
        self._is_cut = False


class _Wire(Link):
    dead = False

    async def sent(self, data: bytes) -> bool:
        return await self._carried()

    async def answered(self, data: bytes) -> bool:
        return await self._carried()

    async def ended(self) -> None:
        await self._carried()

    async def _carried(self) -> bool:
        if self.dead:
            await asyncio.Event().wait()
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
        for task, writer in self._clients.items():
            writer.transport.abort()
            task.cancel()
        if self._clients:
            await asyncio.wait(self._clients)
        await self._server.wait_closed()
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        ways: set[asyncio.Task[None]] = set()
        behind_writer: asyncio.StreamWriter | None = None
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
            await link.ended()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the server is not there, or the gate is shut
        finally:
            if behind_writer is not None:
                behind_writer.transport.abort()
            writer.transport.abort()
            for way in ways:
                # A link may be holding something up.
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            del self._clients[task]


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[bytes], Awaitable[bool]]
) -> None:
    with contextlib.suppress(OSError):
        while (data := await reader.read(65536)) and await passes(data):
            writer.write(data)
            await writer.drain()
