"""The port to a model provider: one call, one answer or one failure (EX-3: no retries in here)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.job_type import Message

#: Letters per token in English prose, on the average; for estimates where nobody counted.
LETTERS_PER_TOKEN = 4


class TokenSource(StrEnum):
    """How token counts came about."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a call used."""

    input_tokens: int = 0
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.NONE


NO_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderCall:
    """One question, as it goes on the wire.

    `timeout` bounds the whole call, from connecting to the last byte; without it the provider's own bound holds.
    """

    model: str
    messages: Sequence[Message]
    output_schema: JsonObject
    max_output_tokens: int
    temperature: float
    timeout: timedelta | None = None

    def estimated_usage(self, *, answer: str = "") -> Usage:
        """Estimate the tokens of this call from the lengths of its texts."""
        sent = sum(len(message.content) for message in self.messages)
        return Usage(
            input_tokens=-(-sent // LETTERS_PER_TOKEN),
            output_tokens=-(-len(answer) // LETTERS_PER_TOKEN),
            token_source=TokenSource.ESTIMATED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswer:
    """What a model said. `truncated`: it stopped at `max_output_tokens`, so the text is not whole."""

    text: str
    truncated: bool
    usage: Usage


class ProviderFailed(ExecutionFailed):
    """A call failed at the provider. The money may be spent all the same: `usage` says how much (EX-6)."""

    def __init__(
        self, code: str, internal: str, *, usage: Usage = NO_USAGE, retry_after: timedelta | None = None
    ) -> None:
        super().__init__(code, internal, retry_after=retry_after)
        self.usage = usage


class Provider(Protocol):
    """A way to reach models. One instance serves all runs of a process, concurrently."""

    @property
    def name(self) -> str:
        """Name in usage rows, for example `openai` or `offline`."""
        ...

    async def complete(self, call: ProviderCall) -> ProviderAnswer:
        """Ask once: at most one request on the wire. Cancelling the task aborts that request.

        Raises:
            ProviderFailed: `PROVIDER_*`, `CREDENTIAL_*`, `CONTENT_SAFETY_*`; its text holds no key, prompt or answer.
            ExecutionFailed: `UNSUPPORTED_SCHEMA` (the offline provider).

        """
        ...

    async def close(self) -> None:
        """Let connections go. Call it once, when nothing uses the provider any more."""
        ...
