import re
import time
from typing import Any

import pytest

from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.patterns import check_pattern
from aijobs.schema import check_schema, validate_answer


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


GOOD: dict[str, JsonObject] = {
    "empty": {"type": "object"},
    "dialect": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/a",
        "type": "object",
    },
    "tree": {
        **of(root={"$ref": "#/$defs/node"}),
        "$defs": {"node": of(children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
    },
    "whole schema again": of(child={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "anchor": {**of(a={"$ref": "#here"}), "$defs": {"x": {"$anchor": "here", "type": "string"}}},
    "property called $ref": of(**{"$ref": {"type": "string"}}),
    "reference in a default is no reference": of(a={"default": {"$ref": "http://example.org/x"}}),
    "escaped pointer": {**of(a={"$ref": "#/$defs/x~1y%20z"}), "$defs": {"x/y z": {"type": "string"}}},
    "format is an annotation": of(a={"type": "string", "format": "email"}),
}

BAD: dict[str, tuple[JsonObject, str]] = {
    "no type": ({}, "$.type: "),
    "array": ({"type": "array"}, "$.type: "),
    "type is a list": ({"type": ["object", "null"]}, "$.type: "),
    "unknown type": (of(a={"type": "text"}), "$.properties.a.type: "),
    "keyword of the wrong type": (of(a={"minimum": "x"}), '$.properties.a.minimum: "x" is not of type number'),
    "other draft": ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, "$.$schema: "),
    "remote reference": (of(a={"$ref": "https://example.org/x.json"}), "$.properties.a.$ref: "),
    "file reference": (of(a={"items": {"$ref": "file:///etc/passwd"}}), "$.properties.a.items.$ref: "),
    "relative reference": (of(a={"$ref": "other.json"}), "$.properties.a.$ref: "),
    "reference to nothing": (of(a={"$ref": "#/$defs/x"}), "$.properties.a.$ref: "),
    "remote reference in allOf": (of(a={"allOf": [{}, {"$ref": "urn:x"}]}), "$.properties.a.allOf[1].$ref: "),
    "id below the top": (of(a={"$id": "https://example.org/b"}), "$.properties.a.$id: "),
    "circle": ({**of(a={"$ref": "#/$defs/x"}), "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}, "refers to itself"),
    "circle of two": (
        {**of(a={"$ref": "#/$defs/x"}), "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"not": {"$ref": "#/$defs/x"}}}},
        "refers to itself",
    ),
    "broken pattern": (of(a={"pattern": "("}), "$.properties.a: no regular expression"),
    "pattern that runs away": (of(a={"pattern": "^(a+)+$"}), "$.properties.a: "),
    "pattern of names that runs away": (of(a={"patternProperties": {"(a*)*b": {}}}), "$.properties.a: "),
    "too large": (of(a={"enum": ["x" * 70_000]}), "at most 65536"),
    "too deep": (
        of(
            a={
                "default": [
                    [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]
                ]
            }
        ),
        "nested deeper",
    ),
    "not strict": (of(a={"const": float("nan")}), "not a finite number"),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_schema_is_accepted(case):
    check_schema(GOOD[case])


@pytest.mark.parametrize("case", BAD)
def test_a_schema_is_refused_with_the_place(case):
    schema, words = BAD[case]
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        check_schema(schema)
    assert len(str(refusal.value)) < 400


RICH: JsonObject = {
    **of(
        items={
            "type": "array",
            "maxItems": 3,
            "uniqueItems": True,
            "items": of(score={"type": "integer", "maximum": 100}),
        },
        kind={"enum": ["a", "b"]},
        code={"type": "string", "pattern": "^[a-z]+$"},
        only={"const": 1},
    ),
    "required": ["items", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            {"items": [{}, {"score": 1}, {"score": 140}], "kind": "a"},
            "$.items[2].score: 140 is greater than the maximum of 100",
        ),
        ({"items": [{"score": "x"}], "kind": "a"}, '$.items[0].score: "x" is not of type integer'),
        ({"items": [{}, {}], "kind": "a"}, "$.items: the list has the same item twice"),
        ({"items": [{"score": 1}, {"score": 1.0}], "kind": "a"}, "$.items: the list has the same item twice"),
        ({"items": [], "kind": "c"}, '$.kind: "c" is not one of ["a", "b"]'),
        ({}, '$: missing: "items", "kind"'),
        ({"items": [], "kind": "a", "z": 1, "y": 2}, '$: not allowed: "y", "z"'),
        ({"items": [], "kind": "a", "code": "A"}, '$.code: "A" does not match the pattern "^[a-z]+$"'),
        ({"items": [], "kind": "a", "code": "a" * 1001}, "$.code: the text is longer than 1000 characters"),
        ({"items": [], "kind": "a", "only": 2}, "$.only: 2 is not 1"),
    ],
)
def test_the_feedback_says_what_is_wrong_and_where(value, line):
    with pytest.raises(ExecutionFailed) as refusal:
        validate_answer(value, RICH)
    assert refusal.value.code == "VALIDATION_SCHEMA"
    assert refusal.value.feedback == line


def test_what_fits_passes():
    validate_answer({"items": [{"score": 1}, {"score": 2}], "kind": "b", "code": "x", "only": 1}, RICH)


def test_at_most_ten_errors_are_told():
    with pytest.raises(ExecutionFailed) as refusal:
        validate_answer({"a": list(range(1000))}, of(a={"items": {"type": "string"}}))
    assert len(refusal.value.feedback.splitlines()) == 10


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({"a": "canary" * 1000}, of(a={"type": "integer"})),
        ({"a": "canary" * 1000}, of(a={"maxLength": 3})),
        ({"a": "canary" * 1000}, of(a={"pattern": "x"})),
        ({"a": "canary" * 1000}, of(a={"anyOf": [{"type": "null"}]})),
        ({"a": ["canary"] * 1000}, of(a={"maxItems": 3})),
        ({"a": ["canary"] * 1000}, of(a={"const": 1})),
        ({"canary" * 1000: 1}, {"type": "object", "additionalProperties": False}),
        ({"canary" * 1000: 1}, {"type": "object", "additionalProperties": {"type": "string"}}),
        ({f"canary{n}" * 1000: 1 for n in range(9)}, {"type": "object", "additionalProperties": False}),
        ({"canary" * 1000: 1}, {"type": "object", "propertyNames": {"maxLength": 3}}),
        ({"canary" * 1000: 1}, {"type": "object", "patternProperties": {"^x": {}}}),
    ],
)
def test_values_are_repeated_briefly_to_the_model_and_never_to_operators(value, schema):
    with pytest.raises(ExecutionFailed) as refusal:
        validate_answer(value, schema)
    assert "canary" not in str(refusal.value)
    assert refusal.value.feedback.count("canary") * len("canary") <= 80


def test_references_that_multiply_end_in_a_refusal_not_in_hours():
    levels = {
        f"l{n}": of(a={"allOf": [{"$ref": f"#/$defs/l{n + 1}"}, {"$ref": f"#/$defs/l{n + 1}"}]}) for n in range(40)
    }
    schema = {**of(a={"$ref": "#/$defs/l0"}), "$defs": {**levels, "l40": {}}}
    check_schema(schema)
    value: JsonObject = {}
    for _ in range(45):
        value = {"a": value}
    start = time.perf_counter()
    with pytest.raises(ExecutionFailed) as refusal:
        validate_answer(value, schema)
    assert refusal.value.code == "VALIDATION_SCHEMA"
    assert time.perf_counter() - start < 20


def test_many_objects_are_compared_without_comparing_every_pair():
    start = time.perf_counter()
    validate_answer({"a": [{"n": n} for n in range(30_000)]}, of(a={"uniqueItems": True}))
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-\d{2}-\d{2}$",
        r"^(\d{1,3}\.){3}\d{1,3}$",
        r"^[^@]+@[^@]+\.[^@]+$",
        r"^#[0-9a-fA-F]{6}$",
        r"^(https?://).+$",
        r"^\+?\d{1,3}[- ]?\(?\d{3}\)?[- ]?\d{3}[- ]?\d{4}$",
        "^(red|green|blue)$",
        "^[]a]b{2,}$",
        "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        "a{} a{x}",
    ],
)
def test_an_ordinary_pattern_is_accepted(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$",
        "(a|a)*b",
        "^(a?){30}b",
        "^" + "a?" * 30 + "b",
        "a*a*a*a*b",
        "^(a{1,9}){9}b",
        "(?=a)",
        r"(a)\1",
        "(?i)a",
        "x" * 501,
    ],
)
def test_a_pattern_that_could_run_away_is_refused(pattern):
    with pytest.raises(ValueError, match=r"pattern|repeated|supported"):
        check_pattern(pattern)
