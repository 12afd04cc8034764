"""A scripted model server for tests: OpenAI's chat completions over real HTTP on a free loopback port.

    async with ModelServer([Completion({"answer": 42}), Status(503, headers={"Retry-After": "7"})]) as server:
        provider = OpenAiCompatible(base_url=server.base_url, ...)
        ...
        first = await server.arrival(1)          # waits for the request, with a deadline
        assert first.body["model"] == "some-model"

Each request takes the next reply of the script, or what a callable makes of it. One that finds the script used up is
recorded all the same and answered 501. Requests are recorded exactly as they came; every connection is closed after
its reply, so that one connection is one request. Only the standard library is used.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import responses
from types import TracebackType
from typing import Any, Self, TypeAlias, assert_never

from pydantic import JsonValue

WITHIN = timedelta(seconds=5)
_LARGEST_HEAD = 64 * 1024


@dataclass(frozen=True, slots=True)
class Completion:
    """A chat completion. A content that is no text is sent as its JSON; `usage=None` leaves the counts out."""

    content: JsonValue
    finish_reason: str = "stop"
    usage: tuple[int, int] | None = (11, 7)
    refusal: str | None = None


def truncated(content: str) -> Completion:
    """Make a completion that stopped at the output limit."""
    return Completion(content, finish_reason="length")


@dataclass(frozen=True, slots=True)
class Status:
    """Any status with any headers and body."""

    status: int
    body: bytes | JsonValue = b'{"error": {"message": "scripted", "type": "scripted"}}'
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hang:
    """No reply until the client goes away or the server ends."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the connection (TCP reset), after so many bytes of a reply."""

    after: bytes = b""


@dataclass(frozen=True, slots=True)
class Drip:
    """The beginning of a reply, then a byte at a time until the client goes away or the server ends."""

    every: timedelta = timedelta(milliseconds=50)


@dataclass(frozen=True, slots=True)
class Held:
    """A reply that waits for a signal."""

    until: asyncio.Event
    reply: "Reply"


Reply: TypeAlias = Completion | Status | Hang | Reset | Drip | Held


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request as it came. Header names are lower case; `body` is the parsed JSON, None if it was none."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: Any


class ModelServer:
    """The server; an async context manager.

    Args:
        script: replies in order, or a callable that makes a reply from each request.

    Attributes:
        requests: every request so far, in order.

    """

    def __init__(self, script: Iterable[Reply] | Callable[[RecordedRequest], Reply] = ()) -> None:
        if callable(script):
            self._reply_to = script
        else:
            replies = iter(script)
            self._reply_to = lambda _: next(replies, Status(501))
        self.requests: list[RecordedRequest] = []
        self._gone: set[int] = set()
        self._changed = asyncio.Condition()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_LARGEST_HEAD)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None  # noqa: S101 - entered before it is left
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def base_url(self) -> str:
        """Address for clients, up to and including `/v1`."""
        if self._server is None:
            raise RuntimeError("the server is not running: use it as an async context manager")
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}/v1"

    async def arrival(self, number: int, *, within: timedelta = WITHIN) -> RecordedRequest:
        """Wait for a request and return it; the first has the number 1.

        Raises:
            TimeoutError: it did not come in time.

        """
        await self._until(lambda: len(self.requests) >= number, within)
        return self.requests[number - 1]

    async def disconnect(self, number: int, *, within: timedelta = WITHIN) -> None:
        """Wait until the client of a request has gone away before it got its reply.

        Raises:
            TimeoutError: it is still there, or it got its reply.

        """
        await self._until(lambda: number in self._gone, within)

    async def _until(self, happened: Callable[[], bool], within: timedelta) -> None:
        async with asyncio.timeout(within.total_seconds()), self._changed:
            await self._changed.wait_for(happened)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None  # noqa: S101 - asyncio runs this in a task
        self._handlers.add(handler)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._handlers.discard(handler)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _read(reader)
        self.requests.append(request)
        number = len(self.requests)
        await self._tell()
        reply = self._reply_to(request)
        while isinstance(reply, Held):
            if await self._left(reader, reply.until.wait()):
                self._gone.add(number)
                await self._tell()
                return
            reply = reply.reply
        match reply:
            case Hang():
                await self._left(reader, asyncio.Event().wait())
                self._gone.add(number)
                await self._tell()
            case Drip():
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n")
                while not await self._left(reader, asyncio.sleep(reply.every.total_seconds())):
                    writer.write(b" ")
                    await writer.drain()
                self._gone.add(number)
                await self._tell()
            case Reset():
                writer.write(reply.after)
                await writer.drain()
                writer.transport.abort()
            case Completion():
                await _write(writer, 200, _completion(reply, request), {})
            case Status():
                await _write(writer, reply.status, reply.body, reply.headers)
            case _:
                assert_never(reply)

    async def _left(self, reader: asyncio.StreamReader, signal: Awaitable[Any]) -> bool:
        """Wait for a signal; True if the client closed its connection first."""
        closing = asyncio.ensure_future(reader.read(1))
        waiting = asyncio.ensure_future(signal)
        try:
            await asyncio.wait({closing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return not waiting.done()
        finally:
            closing.cancel()
            waiting.cancel()
            await asyncio.gather(closing, waiting, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> RecordedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = start.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    return RecordedRequest(method=method, path=path, headers=headers, raw=raw, body=body)


async def _write(
    writer: asyncio.StreamWriter, status: int, body: bytes | JsonValue, headers: Mapping[str, str]
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    phrase = responses.get(status, "Scripted")
    sent = {"Content-Type": "application/json", **headers, "Content-Length": str(len(content)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    writer.write(f"HTTP/1.1 {status} {phrase}\r\n{lines}\r\n".encode("latin-1") + content)
    await writer.drain()


def _completion(reply: Completion, request: RecordedRequest) -> JsonValue:
    content = reply.content if isinstance(reply.content, str | None) else json.dumps(reply.content)
    model = request.body.get("model") if isinstance(request.body, dict) else None
    completion: dict[str, JsonValue] = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, "refusal": reply.refusal},
                "finish_reason": reply.finish_reason,
            }
        ],
    }
    if reply.usage is not None:
        sent, received = reply.usage
        completion["usage"] = {
            "prompt_tokens": sent,
            "completion_tokens": received,
            "total_tokens": sent + received,
        }
    return completion
