"""What the scripted server promises to tests."""

import asyncio
from datetime import timedelta

import pytest

from aijobs.testing.model_server import Completion, Hang, ModelServer, Status


async def post(address: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Mine: Yes\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def status(address: str, body: bytes = b"{}") -> int:
    reader, writer = await post(address, body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1])


async def test_replies_come_in_the_order_of_the_script_and_a_used_up_one_says_so():
    async with ModelServer([Status(503), Completion("x")]) as server:
        assert [await status(server.base_url) for _ in range(3)] == [503, 200, 501]
        assert len(server.requests) == 3


async def test_a_callable_makes_the_reply_from_the_request():
    async with ModelServer(lambda request: Status(request.body["status"])) as server:
        assert await status(server.base_url, b'{"status": 418}') == 418


async def test_a_request_is_recorded_as_it_came():
    async with ModelServer([Status(200)]) as server:
        await status(server.base_url, b'{"a": [1]}')
        request = await server.arrival(1)
    assert (request.method, request.path, request.raw) == ("POST", "/v1/chat/completions", b'{"a": [1]}')
    assert request.headers["x-mine"] == "Yes"
    assert request.body == {"a": [1]}


async def test_what_does_not_come_ends_with_the_deadline():
    async with ModelServer() as server:
        with pytest.raises(TimeoutError):
            await server.arrival(1, within=timedelta(milliseconds=20))


async def test_a_client_that_stays_is_not_gone_and_one_that_leaves_is():
    async with ModelServer([Hang()]) as server:
        _, writer = await post(server.base_url, b"{}")
        await server.arrival(1)
        with pytest.raises(TimeoutError):
            await server.disconnect(1, within=timedelta(milliseconds=20))
        writer.close()
        await server.disconnect(1)


async def test_the_server_ends_with_a_client_still_hanging():
    async with asyncio.timeout(5):
        async with ModelServer([Hang()]) as server:
            _, writer = await post(server.base_url, b"{}")
            await server.arrival(1)
        writer.close()
