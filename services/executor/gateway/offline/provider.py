"""Provider `offline`: deterministic, no network, no key. See docs/offline.md."""

import asyncio
import re
from collections.abc import Sequence

from aijobs import canonical
from aijobs.job_type import Message
from services.executor.gateway.offline.answer import Answerer
from services.executor.gateway.offline.text import Document
from services.executor.gateway.provider import LETTERS_PER_TOKEN, ProviderAnswer, ProviderCall

# From the first opening line to the last closing one: a document may hold such lines itself.
_DOCUMENT = re.compile(r"^<document>[ \t]*\n(.*)^</document>[ \t]*$", re.MULTILINE | re.DOTALL)


class OfflineProvider:
    """Computes answers from the prompt's own text; implements `services.executor.gateway.provider.Provider`."""

    name = "offline"

    async def complete(self, call: ProviderCall) -> ProviderAnswer:
        """Compute an answer that fits the call's schema; the same call gets the same answer.

        Raises:
            ExecutionFailed: `UNSUPPORTED_SCHEMA`, naming the place and the keyword.

        """
        # Off the event loop: a long document takes a moment.
        text = await asyncio.to_thread(_answer, call)
        limit = call.max_output_tokens * LETTERS_PER_TOKEN
        sent = text[:limit]
        return ProviderAnswer(text=sent, truncated=len(text) > limit, usage=call.estimated_usage(answer=sent))

    async def close(self) -> None:
        """Nothing to close."""


def _answer(call: ProviderCall) -> str:
    document, question = _taken_apart(call.messages)
    return canonical.dump(Answerer(call.output_schema, Document.of(document), question).answer())


def _taken_apart(messages: Sequence[Message]) -> tuple[str, str]:
    """Return the text to work on and the words around it."""
    said = [message.content.replace("\r\n", "\n") for message in messages if message.role == "user"]
    documents = [match for text in said if (match := _DOCUMENT.search(text))]
    if not documents:
        return "\n\n".join(said), ""
    around = [_DOCUMENT.sub("", text) for text in said]
    return "\n\n".join(match[1] for match in documents), "\n".join(around)
