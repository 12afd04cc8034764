"""What a violated schema keyword means, in words that a model or a person can act on.

The words repeat at most 60 characters of the value: it may be a model's whole answer.
"""

import json
from collections.abc import Iterable
from typing import Any

from jsonschema import ValidationError

from aijobs.schema_walk import shortened

LONGEST_QUOTE = 60
#: Names that one sentence lists.
_MOST_NAMES = 3

#: keyword → sentence; `{value}` is the answer's, `{limit}` the schema's.
_SENTENCES = {
    "type": "{value} is not of type {limit}",
    "enum": "{value} is not one of {limit}",
    "const": "{value} is not {limit}",
    "minimum": "{value} is less than the minimum of {limit}",
    "maximum": "{value} is greater than the maximum of {limit}",
    "exclusiveMinimum": "{value} must be greater than {limit}",
    "exclusiveMaximum": "{value} must be less than {limit}",
    "multipleOf": "{value} is not a multiple of {limit}",
    "minLength": "the text is shorter than {limit} characters",
    "maxLength": "the text is longer than {limit} characters",
    "pattern": "{value} does not match the pattern {limit}",
    "minItems": "the list has fewer than {limit} items",
    "maxItems": "the list has more than {limit} items",
    "uniqueItems": "the list has the same item twice",
    "contains": "the list has no item, too few or too many of the wanted kind",
    "minProperties": "the object has fewer than {limit} properties",
    "maxProperties": "the object has more than {limit} properties",
    "propertyNames": "the object has a property with a name that is not allowed",
    "anyOf": "{value} fits none of the alternatives (anyOf)",
    "oneOf": "{value} does not fit exactly one of the alternatives (oneOf)",
    "not": "{value} is what the schema excludes (not)",
    "unevaluatedProperties": "the object has a property that is not allowed",
    "unevaluatedItems": "the list has an item that is not allowed",
}
#: The schema's side may be longer: a list of allowed values is what helps most.
_LONGEST_LIMIT = 200


def in_words(error: ValidationError) -> str:
    """Say what is wrong, without the place."""
    # Any: the stubs allow for an error that no validator has filled in yet.
    keyword: Any = error.validator
    limit: Any = error.validator_value
    instance: Any = error.instance
    match keyword:
        case "required":
            return f"missing: {_names(name for name in limit if name not in instance)}"
        case "dependentRequired":
            return "a property is missing that another one requires"
        case "additionalProperties" if limit is False:
            return f"not allowed: {_names(_unknown(error))}"
        case None:
            # The schema is `false`.
            return "nothing is allowed here"
        case _:
            sentence = _SENTENCES.get(keyword, f"does not satisfy the schema's {keyword}")
            return sentence.format(value=_quoted(instance, LONGEST_QUOTE), limit=_limit(limit))


def _limit(value: Any) -> str:
    return value if isinstance(value, str) and value in _TYPES else _quoted(value, _LONGEST_LIMIT)


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _quoted(value: Any, length: int) -> str:
    match value:
        case dict():
            return "the object"
        case list() if length == LONGEST_QUOTE:
            return "the list"
        case _:
            return shortened(json.dumps(value, ensure_ascii=False), length)


def _names(names: Iterable[str]) -> str:
    first = list(names)
    quoted = [json.dumps(shortened(name, LONGEST_QUOTE // _MOST_NAMES), ensure_ascii=False) for name in first]
    more = len(quoted) - _MOST_NAMES
    return ", ".join(quoted[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _unknown(error: ValidationError) -> Iterable[str]:
    schema: Any = error.schema
    instance: Any = error.instance
    known = schema.get("properties", {})
    return sorted(name for name in instance if name not in known)
