"""Any server that speaks OpenAI's chat completions over HTTP: OpenAI, DeepSeek, vLLM, Ollama, llama.cpp.

One call is one request: the SDK's own retries are off (it would send three), redirects are not followed, and nothing
turns either on. What goes wrong becomes a code of the taxonomy (EX-2):

    what happened                                code                        wait
    no answer in time                            PROVIDER_TIMEOUT
    no connection, connection lost               PROVIDER_UNREACHABLE
    429                                          PROVIDER_RATE_LIMITED       Retry-After
    401, 403                                     CREDENTIAL_REJECTED
    400, 404, 413, 422                           PROVIDER_REQUEST_REJECTED
    stopped by the provider's safety filter      CONTENT_SAFETY_PROVIDER
    200 that is no completion, or an empty one   PROVIDER_MALFORMED
    any answer above 8 MiB, or a packed one      PROVIDER_MALFORMED
    anything else                                PROVIDER_UNAVAILABLE        Retry-After

Failures are raised without their cause: the SDK's exceptions hold request, response and often the prompt.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Annotated, Any, cast

from httpx2 import AsyncByteStream, Response
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    OpenAIError,
)
from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError

from services.executor.gateway.provider import (
    NO_USAGE,
    ProviderAnswer,
    ProviderCall,
    ProviderFailed,
    TokenSource,
    Usage,
)

#: Bound of a call that brings none: as long as the longest execution of a job may take.
LONGEST_CALL = timedelta(seconds=600)
CONNECT_TIMEOUT = timedelta(seconds=5)
#: An answer of 1 MiB is what can be used; around it are counts and, from some, its reasoning.
LARGEST_BODY = 8 * 1024 * 1024
#: A provider that reports more tokens than this reports nonsense.
_MOST_TOKENS = 2**31 - 1
_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,6})?")


class JsonMode(StrEnum):
    """How the provider is told to answer in JSON (`response_format`). Not every server knows `json_schema`."""

    OBJECT = "json_object"
    SCHEMA = "json_schema"


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
    completion_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] = 0


def _usable(value: Any) -> Any:
    """Take counts that make no sense for no counts: an answer is not thrown away for them."""
    try:
        return _Usage.model_validate(value)
    except ValidationError:
        return None


class _Completion(BaseModel):
    choices: list[_Choice] = []
    usage: Annotated[_Usage | None, BeforeValidator(_usable)] = None


class OpenAiCompatible:
    """Provider over HTTP; implements `services.executor.gateway.provider.Provider`.

    Args:
        name: name in usage rows.
        base_url: up to and including the version, for example `https://api.openai.com/v1`.
        api_key: sent as bearer token.
        json_mode: what the server can do.
        now: the time, aware; for a Retry-After that is a date.

    """

    def __init__(
        self,
        *,
        name: str,
        base_url: str,
        api_key: SecretStr,
        json_mode: JsonMode,
        now: Callable[[], datetime],
    ) -> None:
        self.name = name
        self._json_mode = json_mode
        self._now = now
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key=api_key.get_secret_value(),
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(
                follow_redirects=False,
                # Unpacked, an answer could be of any size.
                headers={"Accept-Encoding": "identity"},
                event_hooks={"response": [_bound]},
            ),
        )
        # The SDK takes these from the environment; only our own settings say what is sent.
        self._client.organization = None
        self._client.project = None

    async def complete(self, call: ProviderCall) -> ProviderAnswer:
        """Ask once; see `Provider`.

        Raises:
            ProviderFailed: see the table at the head of this file.

        """
        bound = (call.timeout or LONGEST_CALL).total_seconds()
        try:
            # The SDK's timeout is for each read; this one is for the whole call.
            async with asyncio.timeout(bound):
                body = await self._send(call, bound)
        except (TimeoutError, APITimeoutError):
            failure = ProviderFailed(
                "PROVIDER_TIMEOUT", f"{self.name}: no answer within {bound:g} s", usage=call.estimated_usage()
            )
        except APIConnectionError as error:
            failure = ProviderFailed(
                "PROVIDER_UNREACHABLE", f"{self.name}: no connection, or it was lost ({_cause(error)})"
            )
        except APIStatusError as error:
            failure = self._refused(error)
        except _UnreadableBody as refusal:
            failure = ProviderFailed("PROVIDER_MALFORMED", f"{self.name}: {refusal}", usage=call.estimated_usage())
        except OpenAIError as error:
            failure = ProviderFailed("PROVIDER_UNAVAILABLE", f"{self.name}: {type(error).__name__}")
        else:
            return self._answer(call, body)
        # Raised outside of the handler: not even the hidden context leads to the SDK's exception.
        raise failure

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _send(self, call: ProviderCall, bound: float) -> bytes:
        # The raw answer: the SDK's own models accept anything, so its shape is checked here.
        response = await self._client.chat.completions.with_raw_response.create(
            model=call.model,
            messages=[_message(message.role, message.content) for message in call.messages],
            max_tokens=call.max_output_tokens,
            temperature=call.temperature,
            response_format=self._response_format(call),
            timeout=bound,
        )
        return response.content

    def _response_format(self, call: ProviderCall) -> Any:
        match self._json_mode:
            case JsonMode.OBJECT:
                return {"type": "json_object"}
            case JsonMode.SCHEMA:
                return {"type": "json_schema", "json_schema": {"name": "answer", "schema": call.output_schema}}

    def _refused(self, error: APIStatusError) -> ProviderFailed:
        status = error.status_code
        internal = f"{self.name}: HTTP {status}"
        retry_after = _retry_after(error.response.headers, self._now)
        match status:
            case 429:
                return ProviderFailed("PROVIDER_RATE_LIMITED", internal, retry_after=retry_after)
            case 401 | 403:
                return ProviderFailed("CREDENTIAL_REJECTED", internal)
            case 400 | 404 | 413 | 422:
                return ProviderFailed("PROVIDER_REQUEST_REJECTED", internal)
            case _:
                return ProviderFailed(
                    "PROVIDER_UNAVAILABLE", internal, usage=_reported(error.response.content), retry_after=retry_after
                )

    def _answer(self, call: ProviderCall, body: bytes) -> ProviderAnswer:
        try:
            completion = _Completion.model_validate_json(body)
        except ValidationError:
            completion = None
        if completion is None:
            raise ProviderFailed(
                "PROVIDER_MALFORMED", f"{self.name}: the answer is no chat completion", usage=call.estimated_usage()
            )
        choice = completion.choices[0] if completion.choices else None
        text = (choice.message.content if choice else None) or ""
        usage = _counted(completion.usage) if completion.usage else call.estimated_usage(answer=text)
        if choice and (choice.message.refusal or choice.finish_reason == "content_filter"):
            raise ProviderFailed("CONTENT_SAFETY_PROVIDER", f"{self.name}: refused by its safety filter", usage=usage)
        truncated = choice is not None and choice.finish_reason == "length"
        # A reasoning model can think until its limit and say nothing: that is cut off, not malformed.
        if not text.strip() and not truncated:
            raise ProviderFailed("PROVIDER_MALFORMED", f"{self.name}: the completion is empty", usage=usage)
        return ProviderAnswer(text=text, truncated=truncated, usage=usage)


class _UnreadableBody(Exception):
    """An answer that is not read to its end. The message says why, in words of ours."""


class _BoundedBody(AsyncByteStream):
    """The body of a response, up to a limit."""

    def __init__(self, response: Response) -> None:
        self._body = response.stream
        self._packed = response.headers.get("content-encoding", "identity").strip().lower() != "identity"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packed:
            raise _UnreadableBody("the answer is packed, though it was asked for as it is")
        size = 0
        async for part in cast("AsyncByteStream", self._body):
            size += len(part)
            if size > LARGEST_BODY:
                raise _UnreadableBody(f"the answer is larger than {LARGEST_BODY} bytes")
            yield part

    async def aclose(self) -> None:
        await cast("AsyncByteStream", self._body).aclose()


async def _bound(response: Response) -> None:
    response.stream = _BoundedBody(response)


def _message(role: str, content: str) -> Any:
    return {"role": role, "content": content}


def _counted(usage: _Usage) -> Usage:
    return Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        token_source=TokenSource.MEASURED,
    )


def _reported(body: bytes) -> Usage:
    """Read what a failing provider says it used all the same."""
    try:
        usage = _Completion.model_validate_json(body).usage
    except ValidationError:
        usage = None
    return _counted(usage) if usage else NO_USAGE


def _cause(error: APIConnectionError) -> str:
    # The class only: messages of lower layers may hold addresses with credentials in them.
    return type(error.__cause__ or error).__name__


def _retry_after(headers: Mapping[str, str], now: Callable[[], datetime]) -> timedelta | None:
    """Read Retry-After: seconds, or an HTTP date counted from the answer's own Date (RFC 9110, section 10.2.3)."""
    value = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return timedelta(seconds=float(value))
    until = _http_date(value)
    if until is None:
        return None
    return max(timedelta(0), until - (_http_date(headers.get("date", "")) or now()))


def _http_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
