"""The provider over real HTTP against the scripted server."""

import asyncio
import gzip
import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr

from aijobs.canonical import JsonObject
from aijobs.job_type import Message
from aijobs.testing.model_server import Completion, Hang, Held, ModelServer, Reply, Reset, Status, truncated
from services.executor.gateway.openai_compatible import JsonMode, OpenAiCompatible
from services.executor.gateway.provider import ProviderAnswer, ProviderCall, ProviderFailed, TokenSource, Usage

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
KEY = "canary-key"
PROMPT = "canary-prompt"
ANSWER = "canary-answer"
SCHEMA: JsonObject = {"type": "object", "properties": {"answer": {"type": "integer"}}}


def provider(base_url: str, json_mode: JsonMode = JsonMode.OBJECT) -> OpenAiCompatible:
    return OpenAiCompatible(
        name="openai",
        base_url=base_url,
        api_key=SecretStr(KEY),
        json_mode=json_mode,
        now=lambda: NOW,
    )


def call(timeout: timedelta = timedelta(seconds=5)) -> ProviderCall:
    return ProviderCall(
        model="some-model",
        messages=[Message(role="system", content="Answer in JSON."), Message(role="user", content=PROMPT)],
        output_schema=SCHEMA,
        max_output_tokens=64,
        temperature=0.3,
        timeout=timeout,
    )


async def ask(reply: Reply) -> ProviderAnswer:
    async with ModelServer([reply]) as server:
        asked = provider(server.base_url)
        try:
            return await asked.complete(call())
        finally:
            await asked.close()
            assert len(server.requests) == 1


async def failure(reply: Reply) -> ProviderFailed:
    with pytest.raises(ProviderFailed) as failed:
        await ask(reply)
    shown = "".join(map(str, (failed.value, failed.value.internal, failed.value.__cause__, failed.value.__context__)))
    for canary in (KEY, PROMPT, ANSWER):
        assert canary not in shown
    return failed.value


async def test_the_request_is_exactly_this():
    async with ModelServer([Completion({"answer": 42})]) as server:
        asked = provider(server.base_url)
        answer = await asked.complete(call())
        await asked.close()
    assert answer.text == '{"answer": 42}'
    assert not answer.truncated
    assert answer.usage == Usage(input_tokens=11, output_tokens=7, token_source=TokenSource.MEASURED)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.body == {
        "model": "some-model",
        "messages": [
            {"role": "system", "content": "Answer in JSON."},
            {"role": "user", "content": PROMPT},
        ],
        "max_tokens": 64,
        "temperature": 0.3,
        "response_format": {"type": "json_object"},
    }
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["x-stainless-retry-count"] == "0"


async def test_the_schema_is_sent_to_servers_that_know_it():
    async with ModelServer([Completion({"answer": 42})]) as server:
        asked = provider(server.base_url, json_mode=JsonMode.SCHEMA)
        await asked.complete(call())
        await asked.close()
    assert server.requests[0].body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA},
    }


async def test_the_environment_adds_nothing_to_the_request(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "other-org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "other-project")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "other-key")
    async with ModelServer([Completion({"answer": 42})]) as server:
        asked = provider(server.base_url)
        await asked.complete(call())
        await asked.close()
    assert "other" not in json.dumps(dict(server.requests[0].headers))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "PROVIDER_REQUEST_REJECTED"),
        (401, "CREDENTIAL_REJECTED"),
        (402, "PROVIDER_UNAVAILABLE"),
        (403, "CREDENTIAL_REJECTED"),
        (404, "PROVIDER_REQUEST_REJECTED"),
        (408, "PROVIDER_UNAVAILABLE"),
        (409, "PROVIDER_UNAVAILABLE"),
        (413, "PROVIDER_REQUEST_REJECTED"),
        (418, "PROVIDER_UNAVAILABLE"),
        (422, "PROVIDER_REQUEST_REJECTED"),
        (429, "PROVIDER_RATE_LIMITED"),
        (500, "PROVIDER_UNAVAILABLE"),
        (502, "PROVIDER_UNAVAILABLE"),
        (503, "PROVIDER_UNAVAILABLE"),
        (504, "PROVIDER_UNAVAILABLE"),
        (529, "PROVIDER_UNAVAILABLE"),
    ],
)
async def test_a_status_has_its_code_and_one_request_on_the_wire(status, code):
    body: JsonObject = {"error": {"message": f"{PROMPT} {KEY}", "type": "x", "code": "y"}}
    failed = await failure(Status(status, body))
    assert failed.code == code
    assert failed.internal == f"openai: HTTP {status}"
    assert failed.retry_after is None


async def test_a_redirect_is_not_followed():
    failed = await failure(Status(307, headers={"Location": "/v1/elsewhere"}))
    assert failed.code == "PROVIDER_UNAVAILABLE"


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "7"}, 7),
        (429, {"Retry-After": "0"}, 0),
        (429, {"Retry-After": "1.5"}, 1.5),
        (503, {"Retry-After": "9"}, 9),
        (429, {"Retry-After": "Tue, 01 Jan 2030 12:00:30 GMT"}, 30),
        (429, {"Retry-After": "Tue, 01 Jan 2030 11:00:00 GMT"}, 0),
        (429, {"Retry-After": "Tue, 01 Jan 2030 12:00:30 GMT", "Date": "Tue, 01 Jan 2030 12:00:20 GMT"}, 10),
        (429, {"Retry-After": "soon"}, None),
        (429, {"Retry-After": "-3"}, None),
        (429, {"Retry-After": "9" * 400}, None),
        (429, {"Retry-After": "1e999"}, None),
        (429, {"Retry-After": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"}, None),
        (429, {}, None),
    ],
)
async def test_the_wish_how_long_to_wait_is_read(status, headers, seconds):
    failed = await failure(Status(status, headers=headers))
    assert failed.retry_after == (None if seconds is None else timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reset(), "PROVIDER_UNREACHABLE"),
        (Reset(after=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "PROVIDER_UNREACHABLE"),
        (Reset(after=b"SSH-2.0-x\r\n"), "PROVIDER_UNREACHABLE"),
        (Status(200, b"<html>"), "PROVIDER_MALFORMED"),
        (Status(200, b""), "PROVIDER_MALFORMED"),
        (Status(200, b"\xff\xfe"), "PROVIDER_MALFORMED"),
        (Status(200, []), "PROVIDER_MALFORMED"),
        (Status(200, {}), "PROVIDER_MALFORMED"),
        (Status(200, {"choices": []}), "PROVIDER_MALFORMED"),
        (Status(200, {"choices": [{"message": {"content": [ANSWER]}}]}), "PROVIDER_MALFORMED"),
        (Status(200, {"choices": ANSWER}), "PROVIDER_MALFORMED"),
        (Completion("x" * (50 * 1024 * 1024)), "PROVIDER_MALFORMED"),
        (Status(500, b"x" * (50 * 1024 * 1024)), "PROVIDER_MALFORMED"),
        (
            Status(200, gzip.compress(b'{"choices": [' + b" " * (50 * 1024 * 1024)), {"Content-Encoding": "gzip"}),
            "PROVIDER_MALFORMED",
        ),
        (Completion(None), "PROVIDER_MALFORMED"),
        (Completion(""), "PROVIDER_MALFORMED"),
        (Completion(" \n"), "PROVIDER_MALFORMED"),
        (Completion(ANSWER, finish_reason="content_filter"), "CONTENT_SAFETY_PROVIDER"),
        (Completion(None, refusal=ANSWER), "CONTENT_SAFETY_PROVIDER"),
    ],
)
async def test_a_useless_reply_has_its_code(reply, code):
    assert (await failure(reply)).code == code


async def test_an_answer_at_the_output_limit_is_marked_as_truncated():
    answer = await ask(truncated('{"answer": 4'))
    assert (answer.text, answer.truncated) == ('{"answer": 4', True)


async def test_a_model_that_only_thought_until_its_limit_is_truncated_not_malformed():
    assert (await ask(truncated(""))).truncated


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": "many"}, {"prompt_tokens": -1, "completion_tokens": 2}, 7])
async def test_without_usable_counts_the_tokens_are_estimated(usage):
    body: JsonObject = {"choices": [{"message": {"content": "12345678"}, "finish_reason": "stop"}], "usage": usage}
    answer = await ask(Status(200, body))
    assert answer.usage.token_source is TokenSource.ESTIMATED
    assert answer.usage.output_tokens == 2


async def test_what_a_failing_provider_reports_as_used_is_kept():
    body: JsonObject = {"error": {"message": "x"}, "usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    failed = await failure(Status(500, body))
    assert failed.usage == Usage(input_tokens=5, token_source=TokenSource.MEASURED)


async def test_no_answer_in_time_is_a_timeout_and_ends_the_request():
    async with ModelServer([Hang()]) as server:
        asked = provider(server.base_url)
        with pytest.raises(ProviderFailed) as failed:
            await asked.complete(call(timeout=timedelta(milliseconds=200)))
        assert failed.value.code == "PROVIDER_TIMEOUT"
        assert failed.value.usage.token_source is TokenSource.ESTIMATED
        await server.disconnect(1)
        await asked.close()
        assert len(server.requests) == 1


async def test_a_refused_connection_is_unreachable():
    async with ModelServer() as server:
        address = server.base_url
    asked = provider(address)
    with pytest.raises(ProviderFailed) as failed:
        await asked.complete(call())
    await asked.close()
    assert failed.value.code == "PROVIDER_UNREACHABLE"
    assert failed.value.usage == Usage()


async def test_a_cancel_reaches_the_provider():
    async with ModelServer([Hang()]) as server:
        asked = provider(server.base_url)
        task = asyncio.create_task(asked.complete(call()))
        await server.arrival(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.disconnect(1, within=timedelta(seconds=2))
        await asked.close()


async def test_a_late_answer_is_an_answer():
    signal = asyncio.Event()
    async with ModelServer([Held(signal, Completion({"answer": 1}))]) as server:
        asked = provider(server.base_url)
        task = asyncio.create_task(asked.complete(call()))
        await server.arrival(1)
        assert not task.done()
        signal.set()
        assert (await task).text == '{"answer": 1}'
        await asked.close()
