"""The part of JSON Schema that the offline provider can answer for, and the refusal of everything else."""

from collections.abc import Mapping

from pydantic import JsonValue

from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.schema_walk import Place, json_path

#: Keywords that restrict a value in ways which are not computed here. Others that are unknown say nothing (2020-12).
BEYOND = (
    "allOf",
    "anyOf",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "format",
    "if",
    "maxContains",
    "maxProperties",
    "minContains",
    "minProperties",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
)
_ANNOTATIONS = frozenset(
    {"$comment", "$ref", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
_LOCAL = "#/$defs/"
_LONGEST_ALIAS = 20


def unsupported(place: Place, keyword: str, why: str) -> ExecutionFailed:
    """Make the refusal. Place and keyword are the caller's own words, so they may be told."""
    return ExecutionFailed(
        "UNSUPPORTED_SCHEMA", f"the offline provider cannot answer: {json_path(place)}: {keyword} {why}"
    )


def supported(schema: JsonValue, place: Place) -> JsonObject:
    """Return a schema of the subset as it is; `true` is one that allows everything.

    Raises:
        ExecutionFailed: `UNSUPPORTED_SCHEMA`, with the place and the keyword.

    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise unsupported(place, "false", "allows no value")
    for keyword in BEYOND:
        if keyword in schema:
            raise unsupported(place, keyword, "is beyond the subset in docs/offline.md")
    return schema


def dereferenced(
    schema: JsonValue, place: Place, definitions: Mapping[str, JsonValue]
) -> tuple[JsonObject, frozenset[str]]:
    """Follow local references.

    Returns:
        The schema, with the annotations that stand beside the reference, and the definitions on the way to it.

    """
    found = supported(schema, place)
    passed: set[str] = set()
    while "$ref" in found:
        reference = found["$ref"]
        name = reference.removeprefix(_LOCAL) if isinstance(reference, str) else ""
        if not isinstance(reference, str) or not reference.startswith(_LOCAL) or name not in definitions:
            raise unsupported(place, "$ref", "is supported for #/$defs/name only")
        beside = {key: value for key, value in found.items() if key != "$ref"}
        if beside.keys() - _ANNOTATIONS:
            raise unsupported(place, "$ref", f"beside {min(beside.keys() - _ANNOTATIONS)} is beyond the subset")
        if name in passed or len(passed) > _LONGEST_ALIAS:
            raise unsupported(place, "$ref", "refers to itself")
        passed.add(name)
        found = {**supported(definitions[name], place), **beside}
    return found, frozenset(passed)


def kind(schema: JsonObject) -> str:
    """Return the JSON type to answer with: the first named one that is not null."""
    named = schema.get("type")
    if isinstance(named, list):
        return next((str(name) for name in named if name != "null"), "null")
    if isinstance(named, str):
        return named
    for keyword, implied in (("properties", "object"), ("required", "object"), ("items", "array")):
        if keyword in schema:
            return implied
    return "string"


def number(schema: JsonObject, keyword: str) -> float | int | None:
    """Return a keyword's number, if it is there."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def length(schema: JsonObject, keyword: str, place: Place, largest: int) -> int | None:
    """Return a keyword's count.

    Raises:
        ExecutionFailed: `UNSUPPORTED_SCHEMA` for a minimum beyond `largest`.

    """
    value = number(schema, keyword)
    if value is None:
        return None
    if keyword.startswith("min") and value > largest:
        raise unsupported(place, keyword, f"is greater than {largest}")
    return int(value)
