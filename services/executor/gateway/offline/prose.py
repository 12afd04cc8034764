"""Texts and figures for properties, by what their names and descriptions ask for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from services.executor.gateway.offline.text import Document, stem, words

_SUMMARY_SENTENCES = 3
_SHORT_TEXT = 40
_READING_WORDS_PER_MINUTE = 200
_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_TITLE = frozenset({"title", "headline", "heading", "name", "subject", "caption"})
_SUMMARY = frozenset({"summary", "abstract", "overview", "synopsis", "tldr", "description", "content", "text", "body"})
_TERM = frozenset({"keyword", "topic", "tag", "term", "theme", "concept", "label", "category", "subject", "word"})
_NAMED = frozenset(
    {"name", "entity", "person", "people", "place", "organization", "organisation", "company", "location"}
)
_SCORE = frozenset(
    {"score", "rating", "confidence", "relevance", "quality", "probability", "ratio", "percent", "percentage", "share"}
)
_COUNT = frozenset({"count", "number", "total", "length", "minute", "time"})


@dataclass(frozen=True, slots=True)
class Hint:
    """What a property is called and what is said about it."""

    names: tuple[str, ...]
    description: str = ""

    @classmethod
    def of(cls, name: str, schema: JsonValue) -> "Hint":
        """Take a name apart (`keyPoints`, `key_points`) and add the schema's own words."""
        return cls(tuple(stem(part.lower()) for part in _NAME_PARTS.findall(name))).described(schema)

    def described(self, schema: JsonValue) -> "Hint":
        """Add a schema's title and description, if it has any."""
        said = [schema.get(key) for key in ("title", "description")] if isinstance(schema, dict) else []
        own = " ".join(part for part in said if isinstance(part, str))
        return replace(self, description=own) if own else self

    @property
    def words(self) -> str:
        """Everything that is said about the property."""
        return " ".join((*self.names, self.description))

    def about(self, subjects: frozenset[str]) -> bool:
        """Tell whether the name, or failing that the description, is about one of some subjects."""
        own = set(self.names)
        return bool(own & subjects) or (not own and bool({stem(word) for word in words(self.description)} & subjects))

    @property
    def wants_names(self) -> bool:
        """Whether it asks for proper names."""
        return self.about(_NAMED)

    @property
    def wants_score(self) -> bool:
        """Whether it asks for a degree, not for something counted."""
        return self.about(_SCORE)

    def list_style(self, longest: int | None) -> Literal["keywords", "sentences"]:
        """Tell what a list of texts is made of."""
        if self.about(_TERM) or self.wants_names or (longest is not None and longest < _SHORT_TEXT):
            return "keywords"
        return "sentences"


class Prose:
    """Gives each property of one object a text of its own."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._given: set[str] = set()

    def text(self, hint: Hint, shortest: int, longest: int | None) -> str:
        """Choose a text for a property and fit it into its bounds, in characters."""
        document = self._document
        if hint.about(_TITLE):
            chosen = [document.title]
        elif hint.about(_SUMMARY):
            chosen = document.best(_SUMMARY_SENTENCES)
        elif hint.about(_TERM) or (longest is not None and longest < _SHORT_TEXT):
            chosen = list(document.keywords[:1])
        else:
            fresh = [sentence for sentence in document.ranked if sentence not in self._given] or document.ranked
            chosen = [document.closest(hint.words, fresh) or next(iter(fresh), "")]
        self._given.update(chosen)
        return fitted([*chosen, *document.ranked], shortest, longest, wanted=len(chosen))

    def names(self) -> Sequence[str]:
        """Proper names in the text."""
        return self._document.names

    def count(self, hint: Hint) -> int | None:
        """Count what a name such as `word_count` asks for; None if it asks for nothing that can be counted."""
        if not hint.about(_COUNT):
            return None
        match hint.names:
            case names if "word" in names:
                return self._document.word_count
            case names if "sentence" in names:
                return len(self._document.sentences)
            case names if "paragraph" in names:
                return len(self._document.paragraphs)
            case names if "reading" in names or "read" in names:
                return -(-self._document.word_count // _READING_WORDS_PER_MINUTE)
            case _:
                return None

    def number(self, hint: Hint, low: float | None, high: float | None) -> float | None:
        """Find a number in the text that is within bounds, nearest to the hint; None if nothing speaks for one."""
        candidates = [
            (value, sentence)
            for value, sentence in self._document.numbers
            if (low is None or low <= value) and (high is None or value <= high)
        ]
        if "year" in hint.names:
            candidates = [(value, sentence) for value, sentence in candidates if 1000 <= value <= 2999]  # noqa: PLR2004 - years
        sentence = self._document.closest(hint.words, (sentence for _, sentence in candidates))
        if sentence is None:
            return candidates[0][0] if candidates and "year" in hint.names else None
        return next(value for value, found in candidates if found == sentence)


def fitted(texts: Iterable[str], shortest: int, longest: int | None, *, wanted: int = 1) -> str:
    """Join texts to one that is within bounds, in characters.

    The first `wanted` are taken whole as long as they fit, further ones only to reach `shortest`; what does not fit
    is cut between words. If the texts do not suffice, they are repeated; of nothing, full stops are made.
    """
    parts = [text for text in dict.fromkeys(texts) if text]
    result = ""
    for number, part in enumerate(parts):
        if number >= wanted and len(result) >= shortest:
            break
        joined = f"{result} {part}" if result else part
        if longest is not None and len(joined) > longest and len(result) >= max(shortest, 1):
            break
        result = joined
    while len(result) < shortest:
        result = f"{result} {result}" if result else "." * shortest
    return result if longest is None or len(result) <= longest else _cut(result, shortest, longest)


def _cut(text: str, shortest: int, longest: int) -> str:
    if longest < 2:  # noqa: PLR2004 - no room for a letter and an ellipsis
        return text[:longest]
    kept = text[: longest - 1]
    if not text[longest - 1].isspace() and " " in kept.strip():
        kept = kept[: kept.rindex(" ")]
    kept = kept.rstrip(" ,;:.-–—") + "…"  # noqa: RUF001
    return kept if shortest <= len(kept) <= longest else text[:longest]
