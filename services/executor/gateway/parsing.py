"""From a model's text to one JSON object, or a refusal; never a guess (EX-8, cases M1 and M2).

    1. The whole text, without byte order mark, white space around it and a leading <think>…</think> block.
    2. The only fenced block (CommonMark back-ticks) that begins with `{` or `[`.
    3. The only balanced {…} in prose.

Two candidates are ambiguous even if they are equal: which one the model meant is luck, and a model that repeats
itself is told so. An object inside an array is no candidate: the answer is then the array. What counts as JSON is
strict (`aijobs.canonical`).

    code                        the answer
    VALIDATION_TOO_LARGE        is larger than 1 MiB
    VALIDATION_TRUNCATED        was cut off at the output limit, as the provider says
    VALIDATION_NOT_JSON         holds no JSON object, or one that strict JSON does not allow
    VALIDATION_AMBIGUOUS        holds several
    VALIDATION_NOT_AN_OBJECT    is JSON, but an array, a text, a number …
    VALIDATION_SCHEMA           does not fit the schema (`aijobs.schema`)

Every step reads the text once: the time is linear in its length.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from aijobs import canonical
from aijobs.canonical import JsonObject, NotStrictJson
from aijobs.failures import ExecutionFailed

LARGEST_ANSWER = 1024 * 1024
#: Reasons name keys of the answer, and keys can be long.
_LONGEST_REASON = 120

_THINK, _END_OF_THINK = "<think>", "</think>"
_FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,})(?P<info>[^`\r\n]*)\r?$", re.MULTILINE)
# A string is one token, so that braces in it do not count. The possessive quantifiers keep the match linear.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(r"[{}\[\]]")
_BRACKET_OR_STRING = re.compile(r'[{}"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    start: int
    end: int
    text: str
    closed: bool


def parse_answer(text: str, *, truncated: bool) -> JsonObject:
    """Find the JSON object that a model's text holds.

    Args:
        text: the model's answer, as the provider gave it.
        truncated: the provider says that the answer was cut off. Then nothing in it is trusted, not even an object
            that happens to be complete.

    Raises:
        ExecutionFailed: one of the codes above, with feedback for the next prompt.

    """
    if len(text) > LARGEST_ANSWER or len(text.encode(errors="surrogatepass")) > LARGEST_ANSWER:
        raise _refused("TOO_LARGE", "the answer is larger than 1 MiB", "The answer was too long. Give a shorter one.")
    if truncated:
        raise _refused(
            "TRUNCATED",
            "the answer was cut off at the output limit",
            "The answer was cut off because it was too long. Give a shorter one that is complete.",
        )
    answer = _without_thoughts(text)
    try:
        value = canonical.parse(answer)
    except NotStrictJson:
        return _from_blocks(answer)
    return _object(value)


def _without_thoughts(text: str) -> str:
    answer = text.lstrip("\ufeff \t\r\n").rstrip()
    if not answer.startswith(_THINK):
        return answer
    _, end, rest = answer.partition(_END_OF_THINK)
    if not end:
        raise _not_json("it is all thoughts and no answer")
    return rest.strip()


def _from_blocks(answer: str) -> JsonObject:
    candidates = [block for block in _blocks(answer) if block.text.startswith(("{", "["))]
    if len(candidates) > 1:
        raise _ambiguous()
    if not candidates or not candidates[0].closed:
        # A fence that never closes says nothing about where the answer ends.
        return _from_prose(answer)
    block = candidates[0]
    if any(_is_object(span) for part in (answer[: block.start], answer[block.end :]) for span, _ in _spans(part)):
        raise _ambiguous()
    try:
        return _object(canonical.parse(block.text))
    except NotStrictJson:
        return _from_prose(block.text)


def _blocks(answer: str) -> Iterator[_Block]:
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(answer):
        if opening is None:
            opening = fence
        elif not fence["info"].strip() and len(fence["ticks"]) >= len(opening["ticks"]):
            yield _Block(
                start=opening.start(), end=fence.end(), text=answer[opening.end() : fence.start()].strip(), closed=True
            )
            opening = None
    if opening is not None:
        yield _Block(start=opening.start(), end=len(answer), text=answer[opening.end() :].strip(), closed=False)


def _from_prose(text: str) -> JsonObject:
    spans = list(_spans(text))
    if len(spans) > 1:
        raise _ambiguous()
    if not spans:
        raise _not_json("it holds no complete JSON object")
    span, in_array = spans[0]
    if in_array:
        raise _not_an_object()
    try:
        return _object(canonical.parse(span))
    except NotStrictJson as error:
        raise _not_json(str(error)) from None


def _spans(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the outermost balanced {…} of a text, and whether they stand between square brackets."""
    brackets = 0
    position = 0
    while (bracket := _BRACKET.search(text, position)) is not None:
        position = bracket.end()
        match bracket[0]:
            case "[":
                brackets += 1
            case "]":
                brackets = max(0, brackets - 1)
            case "{":
                end = _end_of_object(text, bracket.start())
                if end is None:
                    # Whatever follows is inside of it.
                    return
                yield text[bracket.start() : end], brackets > 0
                position = end
            case _:
                pass


def _end_of_object(text: str, start: int) -> int | None:
    depth = 0
    position = start
    while (token := _BRACKET_OR_STRING.search(text, position)) is not None:
        position = token.end()
        match token[0]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return position
            case _:
                string = _STRING.match(text, token.start())
                if string is None:
                    return None
                position = string.end()
    return None


def _is_object(span: str) -> bool:
    try:
        canonical.parse(span)
    except NotStrictJson:
        return False
    return True


def _object(value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise _not_an_object()
    return value


def _refused(code: str, internal: str, feedback: str) -> ExecutionFailed:
    return ExecutionFailed(f"VALIDATION_{code}", internal, feedback=feedback)


def _not_json(reason: str) -> ExecutionFailed:
    # The reason may quote the answer: it is for the model that gave it, not for logs.
    reason = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"
    return _refused(
        "NOT_JSON",
        "the answer holds no strict JSON object",
        f"The answer was not a valid JSON object: {reason}. Answer with exactly one JSON object and nothing else.",
    )


def _not_an_object() -> ExecutionFailed:
    return _refused(
        "NOT_AN_OBJECT",
        "the answer is JSON but no object",
        "The answer was JSON, but not an object. Answer with exactly one JSON object: {…}.",
    )


def _ambiguous() -> ExecutionFailed:
    return _refused(
        "AMBIGUOUS",
        "the answer holds several candidate objects",
        "The answer held more than one JSON object. Answer with exactly one and nothing else.",
    )
