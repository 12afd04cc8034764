"""An answer for a schema of the subset, computed from a document.

What a property is about is read from its name and description; see docs/offline.md for the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import sqrt
from typing import Literal

from pydantic import JsonValue

from aijobs import canonical
from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.schema import validate_answer
from aijobs.schema_walk import Place
from services.executor.gateway.offline.bounds import Bounds
from services.executor.gateway.offline.prose import Hint, Prose, fitted
from services.executor.gateway.offline.subset import dereferenced, kind, length, unsupported
from services.executor.gateway.offline.text import Document, terms

LARGEST_ANSWER = 500_000
LONGEST_TEXT_MINIMUM = 10_000
LONGEST_LIST_MINIMUM = 1000
#: Items of a list that says nothing about their number.
_ITEMS = {"keywords": 5, "sentences": 3, "parts": 3}
_UNDECIDED = frozenset({"neutral", "other", "unknown", "none", "mixed", "medium", "general"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """Where in the answer a value goes, and what it is to be read from."""

    place: Place
    document: Document
    prose: Prose
    hint: Hint
    #: Definitions that are being filled around this value.
    within: frozenset[str] = frozenset()


class Answerer:
    """Fills one schema from one document.

    Args:
        schema: a schema that `aijobs.schema.check_schema` accepts.
        document: the text to read from.
        question: the words of the prompt around the document.

    """

    def __init__(self, schema: JsonObject, document: Document, question: str) -> None:
        self._schema = schema
        self._document = document
        self._question = question
        definitions = schema.get("$defs")
        self._definitions: Mapping[str, JsonValue] = definitions if isinstance(definitions, dict) else {}
        self._left = LARGEST_ANSWER

    def answer(self) -> JsonObject:
        """Compute the answer; it fits the schema.

        Raises:
            ExecutionFailed: `UNSUPPORTED_SCHEMA`, with place and keyword.

        """
        spot = _Spot(place=(), document=self._document, prose=Prose(self._document), hint=Hint.of("", self._schema))
        value = self._value(self._schema, spot)
        if not isinstance(value, dict):
            raise unsupported((), "type", "must be object")
        return value

    def _value(self, schema: JsonValue, spot: _Spot) -> JsonValue:
        found, passed = dereferenced(schema, spot.place, self._definitions)
        if passed & spot.within:
            raise unsupported(spot.place, "$ref", "refers to itself")
        spot = replace(spot, within=spot.within | passed, hint=spot.hint.described(found))
        value: JsonValue
        chosen = "const" in found or "enum" in found
        match "choice" if chosen else kind(found):
            case "choice":
                value = self._choice(found, spot)
            case "object":
                value = self._object(found, spot)
            case "array":
                value = self._array(found, spot)
            case "string":
                value = self._string(found, spot)
            case "integer":
                value = self._integer(found, spot)
            case "number":
                value = self._number(found, spot)
            case "boolean":
                value = spot.document.overlap(spot.hint.words) >= 1 / 2
            case _:
                value = None
        return self._spend(value, spot)

    def _spend(self, value: JsonValue, spot: _Spot) -> JsonValue:
        self._left -= len(value) + 10 if isinstance(value, str) else 10
        if self._left < 0:
            raise unsupported(spot.place, "minItems", f"asks for an answer of more than {LARGEST_ANSWER} characters")
        return value

    def _choice(self, schema: JsonObject, spot: _Spot) -> JsonValue:
        keyword: Literal["const", "enum"] = "const" if "const" in schema else "enum"
        named = schema["enum"] if keyword == "enum" else [schema["const"]]
        options = [option for option in named if _fits(option, schema)] if isinstance(named, list) else []
        if not options:
            raise unsupported(spot.place, keyword, "has no value that fits the other keywords")
        scores = [self._affinity(option, spot.document) for option in options]
        if max(scores) > 0:
            return options[scores.index(max(scores))]
        return next((option for option in options if str(option).lower() in _UNDECIDED), options[0])

    @staticmethod
    def _affinity(option: JsonValue, document: Document) -> float:
        wanted = terms(str(option).replace("_", " "))
        return sum(document.frequency[term] for term in wanted) / len(wanted) if wanted else 0

    def _object(self, schema: JsonObject, spot: _Spot) -> JsonObject:
        properties = schema.get("properties")
        wanted: dict[str, JsonValue] = dict(properties) if isinstance(properties, dict) else {}
        required = schema.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        for name in names:
            if name not in wanted:
                wanted[name] = schema.get("additionalProperties", True)
        result: JsonObject = {}
        for name, part in wanted.items():
            # A property that nothing may fill is left out where that is allowed.
            if part is False and name not in names:
                continue
            self._spend(name, spot)
            hint = Hint.of(name, part)
            result[name] = self._value(part, replace(spot, place=(*spot.place, "properties", name), hint=hint))
        return result

    def _array(self, schema: JsonObject, spot: _Spot) -> list[JsonValue]:
        low = length(schema, "minItems", spot.place, LONGEST_LIST_MINIMUM) or 0
        high = length(schema, "maxItems", spot.place, LONGEST_LIST_MINIMUM)
        if high is not None and high < low:
            raise unsupported(spot.place, "maxItems", "is less than minItems")
        items = schema.get("items", True)
        if high == 0 or (items is False and low == 0):
            return []
        place = (*spot.place, "items")
        item, passed = dereferenced(items, place, self._definitions)
        inner = replace(spot, place=place, hint=spot.hint.described(item))
        plain = kind(item) == "string" and "enum" not in item and "const" not in item
        if plain and not passed & spot.within:
            values = self._texts(item, inner, low, high)
        else:
            values = self._parts(items, inner, low, high)
        if schema.get("uniqueItems") is True:
            values = list({canonical.dump(value): value for value in values}.values())
            if len(values) < low:
                raise unsupported(spot.place, "uniqueItems", "asks for more different items than the text gives")
        return values

    def _texts(self, item: JsonObject, spot: _Spot, low: int, high: int | None) -> list[JsonValue]:
        shortest, longest = self._bounds(item, spot)
        style = spot.hint.list_style(longest)
        wanted = _clamped(_ITEMS[style], low, high)
        if style == "keywords":
            found: Sequence[str] = spot.prose.names() if spot.hint.wants_names else spot.document.keywords
            found = found or spot.document.keywords
        else:
            found = spot.document.best(wanted)
        values = list(dict.fromkeys(fitted([text], 0, longest) for text in found))[:wanted]
        values = [text if len(text) >= shortest else fitted([text, *found], shortest, longest) for text in values]
        if len(values) < low:
            values += islice(cycle(values or [fitted([], shortest, longest)]), low - len(values))
        return [self._spend(value, spot) for value in values]

    def _parts(self, items: JsonValue, spot: _Spot, low: int, high: int | None) -> list[JsonValue]:
        parts = spot.document.parts(_clamped(_ITEMS["parts"], low, high))
        count = _clamped(len(parts), low, high)
        return [
            self._value(items, replace(spot, document=part, prose=Prose(part))) for part in islice(cycle(parts), count)
        ]

    def _bounds(self, schema: JsonObject, spot: _Spot) -> tuple[int, int | None]:
        shortest = length(schema, "minLength", spot.place, LONGEST_TEXT_MINIMUM) or 0
        longest = length(schema, "maxLength", spot.place, LONGEST_TEXT_MINIMUM)
        if longest is not None and longest < shortest:
            raise unsupported(spot.place, "maxLength", "is less than minLength")
        return shortest, longest

    def _string(self, schema: JsonObject, spot: _Spot) -> str:
        shortest, longest = self._bounds(schema, spot)
        return spot.prose.text(spot.hint, shortest, longest)

    def _number(self, schema: JsonObject, spot: _Spot) -> float:
        bounds = Bounds.of_number(schema, spot.place)
        value = bounds.held(self._figure(spot, bounds, width=1))
        rounded = round(value, 2)
        return rounded if rounded == bounds.held(rounded) else value

    def _integer(self, schema: JsonObject, spot: _Spot) -> int:
        bounds = Bounds.of_integer(schema, spot.place)
        return round(bounds.held(round(self._figure(spot, bounds, width=100))))

    def _figure(self, spot: _Spot, bounds: Bounds, *, width: int) -> float:
        """Count, find or estimate a figure; it need not be within the bounds."""
        counted = spot.prose.count(spot.hint)
        if counted is not None:
            return counted
        found = None if spot.hint.wants_score else spot.prose.number(spot.hint, bounds.low, bounds.high)
        if found is not None:
            return found
        # A share of words says little until it is large; the root makes half of a tenth or so.
        share = sqrt(spot.document.overlap(f"{self._question} {spot.hint.words}"))
        low, high = bounds.closed(width)
        # Not high - low: that overflows where the bounds are far apart.
        return low * (1 - share) + high * share


def _clamped(wanted: int, low: int, high: int | None) -> int:
    return max(low, wanted if high is None else min(wanted, high))


def _fits(value: JsonValue, schema: JsonObject) -> bool:
    own: JsonObject = {key: part for key, part in schema.items() if key not in ("$defs", "$id", "$schema")}
    try:
        validate_answer({"value": value}, {"type": "object", "properties": {"value": own}})
    except ExecutionFailed:
        return False
    return True
