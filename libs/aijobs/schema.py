"""JSON Schemas that callers send, and answers checked against them (EX-8, RG-4).

Draft 2020-12, nothing fetched from anywhere, and bounded work: a schema comes from a caller and an answer from a
model, so neither may make the validator run for ever.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any, TypeAlias, cast

from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from pydantic import JsonValue
from referencing import Registry

from aijobs import canonical
from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.patterns import LONGEST_MATCHED_TEXT, check_pattern
from aijobs.schema_walk import DIALECT, check_references, json_path, shortened, subschemas
from aijobs.schema_words import in_words

LARGEST_SCHEMA = 64 * 1024
#: JSON nesting of the schema itself.
DEEPEST_SCHEMA = 50
#: Violations that are told at once.
MOST_ERRORS = 10
#: References followed in one validation. Honest schemas stay far below; `allOf` of two references each, nested
#: thirty times, would need a thousand million.
MOST_REFERENCES = 100_000

_Keyword: TypeAlias = Callable[[Validator, Any, Any, Any], Iterable[ValidationError] | None]


def check_schema(schema: JsonObject) -> None:
    """Check a schema that a caller wants a model's answer to fit.

    It must be valid under Draft 2020-12, have `"type": "object"` at the top, refer to nothing outside itself, be at
    most 64 KiB of canonical JSON and at most 50 levels deep, and have only patterns that cannot run away
    (`aijobs.patterns`). `format` is an annotation, as the draft has it: it checks nothing.

    Raises:
        ValueError: names the place, for example `$.properties.age.minimum: "x" is not of type number`.

    """
    size = len(canonical.dump(schema).encode())
    if size > LARGEST_SCHEMA:
        raise ValueError(f"$: the schema has {size} bytes; at most {LARGEST_SCHEMA} are allowed")
    if _depth(schema) > DEEPEST_SCHEMA:
        raise ValueError(f"$: the schema is nested deeper than {DEEPEST_SCHEMA}")
    dialect = schema.get("$schema", DIALECT)
    if not isinstance(dialect, str) or dialect.rstrip("#") != DIALECT:
        raise ValueError(f"$.$schema: only {DIALECT} is supported")
    error = best_match(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema))
    if error is not None:
        raise ValueError(f"{json_path(error.absolute_path)}: {in_words(error)}")
    if schema.get("type") != "object":
        raise ValueError('$.type: must be "object": the answer is always a JSON object')
    for place, subschema in subschemas(schema):
        for pattern in _patterns(subschema):
            try:
                check_pattern(pattern)
            except ValueError as refusal:
                raise ValueError(f"{json_path(place)}: {refusal}") from refusal
    check_references(schema)


def validate_answer(value: JsonObject, schema: JsonObject) -> None:
    """Validate a parsed answer.

    Args:
        value: strict JSON, as `aijobs.canonical.parse` gives it.
        schema: one that `check_schema` accepts.

    Raises:
        ExecutionFailed: `VALIDATION_SCHEMA`. The feedback has up to 10 lines such as
            `$.items[2].score: 140 is greater than the maximum of 100`, and repeats no long value; the internal text
            repeats none at all.

    """
    budget = _Budget(MOST_REFERENCES)
    # An empty registry retrieves nothing; the library's default one would open URLs.
    validator = _bounded_validator(budget)(schema, registry=Registry())
    try:
        errors = list(islice(validator.iter_errors(value), MOST_ERRORS))
    except (_TooMuchWorkError, RecursionError):
        raise ExecutionFailed(
            "VALIDATION_SCHEMA",
            "the answer is nested too deeply to be checked against its schema",
            feedback="The answer is nested too deeply. Give a simpler one.",
        ) from None
    if not errors:
        return
    keywords = ", ".join(sorted({str(error.validator) for error in errors}))
    # The library reports each missing property by itself; the words name them all at once.
    lines = dict.fromkeys(f"{shortened(json_path(error.absolute_path), 120)}: {in_words(error)}" for error in errors)
    raise ExecutionFailed("VALIDATION_SCHEMA", f"the answer breaks its schema: {keywords}", feedback="\n".join(lines))


def _depth(value: JsonValue) -> int:
    match value:
        case dict():
            return 1 + max(map(_depth, value.values()), default=0)
        case list():
            return 1 + max(map(_depth, value), default=0)
        case _:
            return 0


def _patterns(schema: JsonObject) -> Iterator[str]:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        yield pattern
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        yield from by_pattern


class _TooMuchWorkError(Exception):
    pass


class _Budget:
    def __init__(self, references: int) -> None:
        self._references = references

    def spend(self) -> None:
        self._references -= 1
        if self._references < 0:
            raise _TooMuchWorkError


def _bounded_validator(budget: _Budget) -> type[Validator]:
    original = cast("dict[str, _Keyword]", dict(Draft202012Validator.VALIDATORS))

    def counted(keyword: _Keyword) -> _Keyword:
        def check(validator: Validator, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
            budget.spend()
            return keyword(validator, value, instance, schema)

        return check

    replaced: dict[str, _Keyword] = {
        "$ref": counted(original["$ref"]),
        "$dynamicRef": counted(original["$dynamicRef"]),
        "pattern": _short_text(original["pattern"]),
        "patternProperties": _short_keys(original["patternProperties"]),
        "uniqueItems": _unique_items,
    }
    extend: Callable[..., type[Validator]] = validators.extend
    return extend(Draft202012Validator, replaced)


def _short_text(keyword: _Keyword) -> _Keyword:
    def check(validator: Validator, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        if isinstance(instance, str) and len(instance) > LONGEST_MATCHED_TEXT:
            return [ValidationError("too long", validator="maxLength", validator_value=LONGEST_MATCHED_TEXT)]
        return keyword(validator, value, instance, schema)

    return check


def _short_keys(keyword: _Keyword) -> _Keyword:
    def check(validator: Validator, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        if isinstance(instance, dict) and any(len(key) > LONGEST_MATCHED_TEXT for key in instance):
            return [ValidationError("too long", validator="propertyNames", instance=instance)]
        return keyword(validator, value, instance, schema)

    return check


def _unique_items(validator: Validator, value: Any, instance: Any, _schema: Any) -> Iterable[ValidationError] | None:
    # The library compares every pair when items cannot be sorted: minutes for an answer of 100 KB.
    if value and validator.is_type(instance, "array"):
        texts = sorted(canonical.dump(item) for item in instance)
        if any(one == other for one, other in pairwise(texts)):
            return [ValidationError("not unique")]
    return None
