"""The parts of a JSON Schema and the references between them (Draft 2020-12)."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias
from urllib.parse import unquote

from aijobs.canonical import JsonObject

DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: Schemas that apply to one and the same value, each through the one before.
LONGEST_CHAIN = 20

Place: TypeAlias = tuple[str | int, ...]

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = frozenset(
    {
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_REFERENCES = ("$ref", "$dynamicRef")
#: These apply to the value itself instead of a part of it.
_SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})


def subschemas(schema: JsonObject, place: Place = ()) -> Iterator[tuple[Place, JsonObject]]:
    """Yield the schema and every schema in it, with its place. Values such as `default` or `enum` are no schemas."""
    yield place, schema
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict):
            yield from subschemas(value, (*place, keyword))
        elif keyword in _LIST and isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, dict):
                    yield from subschemas(part, (*place, keyword, index))
        elif keyword in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                if isinstance(part, dict):
                    yield from subschemas(part, (*place, keyword, name))


def check_references(schema: JsonObject) -> None:
    """Check that every reference stays inside the schema, hits a schema and does not go round in a circle.

    Raises:
        ValueError: names the place.

    """
    parts = dict(subschemas(schema))
    targets = _targets(parts)
    for place, part in parts.items():
        if place and "$id" in part:
            raise ValueError(f"{json_path(place)}.$id: only the top of a schema may have one")
        for keyword in _REFERENCES:
            reference = part.get(keyword)
            if isinstance(reference, str) and resolve(reference, targets) is None:
                raise ValueError(
                    f"{json_path(place)}.{keyword}: {reference[:80]!r} names no schema in here; "
                    "references look like #/$defs/name and never leave the schema"
                )
    longest: dict[Place, int] = {}
    for place in parts:
        _chain(place, parts, targets, longest, ())


def resolve(reference: str, targets: dict[str, Place]) -> Place | None:
    """Find the place that a local reference names; None if there is none or it is not local."""
    return targets.get(unquote(reference)) if reference.startswith("#") else None


def _targets(parts: dict[Place, JsonObject]) -> dict[str, Place]:
    targets: dict[str, Place] = {}
    for place, part in parts.items():
        targets["#" + "".join("/" + _escaped(step) for step in place)] = place
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = part.get(keyword)
            if isinstance(anchor, str):
                targets["#" + anchor] = place
    return targets


def _chain(
    place: Place,
    parts: dict[Place, JsonObject],
    targets: dict[str, Place],
    longest: dict[Place, int],
    before: tuple[Place, ...],
) -> int:
    if place in longest and len(before) + longest[place] <= LONGEST_CHAIN:
        return longest[place]
    if len(before) >= LONGEST_CHAIN:
        raise ValueError(
            f"{json_path(before[0])}: refers to itself, or through more than {LONGEST_CHAIN} schemas, "
            "without going into the value"
        )
    steps = [_chain(step, parts, targets, longest, (*before, place)) for step in _same_value(place, parts, targets)]
    longest[place] = 1 + max(steps, default=0)
    return longest[place]


def _same_value(place: Place, parts: dict[Place, JsonObject], targets: dict[str, Place]) -> Iterator[Place]:
    part = parts[place]
    for keyword in _REFERENCES:
        reference = part.get(keyword)
        target = resolve(reference, targets) if isinstance(reference, str) else None
        if target is not None:
            yield target
    for keyword in _SAME_VALUE & part.keys():
        for child, _ in subschemas({keyword: part[keyword]}):
            # Direct children only: allOf.0, not, dependentSchemas.name.
            if child and len(child) == (1 if keyword in _ONE else 2):
                yield (*place, *child)


def _escaped(step: str | int) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")


def json_path(place: Iterable[str | int]) -> str:
    """Write a place as people read it: `$.items[2].name`. Long names are cut: they may come from an answer."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{shortened(step, 40)}" for step in place)


def shortened(text: str, length: int) -> str:
    """Cut a text to at most `length` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"
