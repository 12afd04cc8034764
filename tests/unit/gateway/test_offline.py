import json
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aijobs.failures import ExecutionFailed
from aijobs.job_type import Message
from aijobs.schema import check_schema, validate_answer
from services.executor.gateway.offline.answer import Answerer
from services.executor.gateway.offline.provider import OfflineProvider
from services.executor.gateway.offline.text import Document
from services.executor.gateway.provider import ProviderCall, TokenSource

ARTICLE = """\
# Why lighthouses went dark

For two centuries the lighthouse at Portland Bill was kept by hand. A keeper trimmed the lamp every four hours and
wrote the weather into a log. In 1996 the last keeper left, and a computer took over the lamp.

Automation came for a plain reason: money. A keeper cost about 20,000 pounds a year, and an automatic lamp costs
less than a tenth of that. Ships also carry satellite receivers now, so that few captains look for a lighthouse.

Some lighthouses have found new work. At Portland Bill visitors climb the 153 steps to the lamp; others have become
hotels. Dr. Ann Lewis, who has counted lighthouses for Trinity House, says that a lighthouse without a keeper
"is a lamp, not a home".
"""


def call(
    schema: dict[str, Any],
    *,
    text: str = f"Tell a museum about it.\n<document>\n{ARTICLE}</document>\nThank you.",
    tokens: int = 4096,
) -> ProviderCall:
    messages = [Message(role="system", content="Zebras are instructions."), Message(role="user", content=text)]
    return ProviderCall(
        model="offline", messages=messages, output_schema=schema, max_output_tokens=tokens, temperature=0
    )


async def ask(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    check_schema(schema)
    answer = await OfflineProvider().complete(call(schema, **more))
    value: dict[str, Any] = json.loads(answer.text)
    validate_answer(value, schema)
    return value


TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"title": TEXT}, "Why lighthouses went dark"),
        ({"topic": TEXT}, "lighthouse"),
        ({"title": {"type": "string", "maxLength": 17}}, "Why lighthouses…"),
        (
            {"cost": {"type": "string", "description": "What a keeper cost"}},
            "A keeper cost about 20,000 pounds a year, and an automatic lamp costs less than a tenth of that.",
        ),
        ({"yearly_cost_in_pounds": {"type": "integer"}}, 20000),
        ({"steps": {"type": "integer", "minimum": 100}}, 153),
        ({"year": {"type": "integer"}}, 1996),
        ({"paragraph_count": {"type": "integer"}}, 3),
        ({"word_count": {"type": "integer"}}, len(ARTICLE.split()) - 5),
        ({"reading_minutes": {"type": "integer"}}, 1),
        ({"subject": {"enum": ["football", "lighthouse", "cooking"]}}, "lighthouse"),
        ({"sentiment": {"enum": ["angry", "happy", "neutral"]}}, "neutral"),
        ({"kind": {"const": 7}}, 7),
        ({"mentions_keeper": {"type": "boolean"}}, True),
        ({"mentions_football": {"type": "boolean", "description": "football or tennis"}}, False),
        ({"nothing": {"type": "null"}}, None),
        ({"topic": {"type": ["null", "string"]}}, "lighthouse"),
        ({"keywords": {**TEXTS, "maxItems": 4}}, ["lighthouse", "lamp", "keeper", "Portland Bill"]),
        ({"places": {**TEXTS, "maxItems": 1}}, ["Portland Bill"]),
    ],
)
async def test_a_property_is_filled_by_what_it_asks_for(properties, expected):
    (value,) = (await ask(properties)).values()
    assert value == expected


async def test_a_summary_is_whole_sentences_of_the_text_in_their_order():
    summary = (await ask({"summary": {"type": "string", "maxLength": 600}}))["summary"]
    sentences = Document.of(ARTICLE).sentences
    chosen = [sentence for sentence in sentences if sentence in summary]
    assert len(chosen) == 3
    assert " ".join(chosen) == summary


async def test_properties_of_one_object_do_not_repeat_each_other():
    value = await ask({"first": TEXT, "second": TEXT, "third": TEXT})
    assert len(set(value.values())) == 3


async def test_items_of_a_list_of_objects_go_through_the_text():
    sections: dict[str, Any] = {
        "type": "array",
        "items": {"type": "object", "properties": {"summary": TEXT, "heading": TEXT}},
    }
    found = (await ask({"sections": sections}))["sections"]
    assert [section["heading"][:20] for section in found] == [
        "For two centuries th",
        "Automation came for ",
        "Some lighthouses hav",
    ]


async def test_only_the_document_is_read():
    text = json.dumps(await ask({"summary": TEXT, "keywords": {**TEXTS, "maxItems": 50}}))
    assert "museum" not in text
    assert "ebra" not in text


async def test_without_a_document_the_whole_user_message_is_read():
    value = await ask({"summary": TEXT}, text="Owls hunt at night. They see well in the dark.")
    assert value == {"summary": "Owls hunt at night. They see well in the dark."}


async def test_the_same_question_gets_the_same_answer_and_estimated_tokens():
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"summary": TEXT, "keywords": TEXTS, "score": {"type": "number"}},
    }
    first, second = [await OfflineProvider().complete(call(schema)) for _ in range(2)]
    assert first == second
    assert first.usage.token_source is TokenSource.ESTIMATED
    assert first.usage.input_tokens > 0
    assert first.usage.output_tokens > 0


async def test_an_answer_beyond_the_output_limit_is_cut_off():
    schema: dict[str, Any] = {"type": "object", "properties": {"summary": TEXT}}
    answer = await OfflineProvider().complete(call(schema, tokens=10))
    assert answer.truncated
    assert len(answer.text) == 40


@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"type": "string", "pattern": "x"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"anyOf": [{}]}, "anyOf"),
        ({"oneOf": [{}]}, "oneOf"),
        ({"type": "integer", "multipleOf": 2}, "multipleOf"),
        ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "#/$defs/loop"}, "$ref"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
        ({"type": "string", "minLength": 10**9}, "minLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"type": "array", "items": {"enum": [1]}, "minItems": 2, "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "minimum"),
        ({"type": "integer", "minimum": 1e300}, "minimum"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}, "minimum"),
        ({"type": "string", "enum": [1, 2]}, "enum"),
        (
            {
                "type": "array",
                "minItems": 1000,
                "items": {"type": "array", "minItems": 1000, "items": {"type": "null"}},
            },
            "minItems",
        ),
    ],
)
async def test_what_is_beyond_the_subset_is_refused_with_place_and_keyword(part, keyword):
    loop: dict[str, Any] = {"type": "object", "properties": {"again": {"$ref": "#/$defs/loop"}}}
    schema: dict[str, Any] = {"type": "object", "properties": {"here": part}, "$defs": {"loop": loop}}
    with pytest.raises(ExecutionFailed) as refusal:
        await OfflineProvider().complete(call(schema))
    assert refusal.value.code == "UNSUPPORTED_SCHEMA"
    assert "$.properties.here" in refusal.value.internal
    assert f": {keyword} " in refusal.value.internal


Schemas: TypeAlias = st.SearchStrategy[Any]

NAMES = st.sampled_from(
    ["title", "summary", "keywords", "score", "year", "wordCount", "places", "x", "key_points", "$ref"]
)
BOUND = st.integers(-5, 30)
FLOAT = st.floats(-1e15, 1e15, allow_nan=False) | st.integers(-300, 300)


def bounds(lowest: str, highest: str, values: Schemas) -> Schemas:
    def ordered(pair: Any) -> dict[str, Any]:
        low, high = sorted(pair)
        return {lowest: low, highest: high}

    both = st.tuples(values, values).map(ordered)
    return st.just({}) | both | values.map(lambda low: {lowest: low}) | values.map(lambda high: {highest: high})


def merged(*parts: Schemas) -> Schemas:
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


DESCRIBED: Schemas = st.just({}) | st.sampled_from(["a short title", "names of people", "how many"]).map(
    lambda d: {"description": d}
)
LENGTHS = bounds("minLength", "maxLength", st.integers(0, 60))
COUNTS = bounds("minItems", "maxItems", st.integers(0, 7))
TYPE: dict[str, Schemas] = {
    name: st.just({"type": name}) | st.just({"type": sorted({name, "null"})})
    for name in ("string", "integer", "number", "boolean", "null", "array", "object")
}
LEAVES: Schemas = st.one_of(
    merged(TYPE["string"], LENGTHS, DESCRIBED),
    merged(TYPE["integer"], bounds("minimum", "maximum", st.integers(-200, 200)), DESCRIBED),
    merged(TYPE["number"], bounds("minimum", "maximum", FLOAT), DESCRIBED),
    merged(TYPE["number"], FLOAT.map(lambda low: {"exclusiveMinimum": low} if abs(low) < 1e300 else {})),
    merged(TYPE["integer"], st.integers(-9, 9).map(lambda high: {"exclusiveMaximum": high})),
    TYPE["boolean"],
    TYPE["null"],
    st.lists(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab ", max_size=4), min_size=1, unique_by=repr
    ).map(lambda options: {"enum": options}),
    st.text("ab ", max_size=3).map(lambda only: {"const": only}),
    st.just({"$ref": "#/$defs/shared"}),
    st.just({}),
)


def containers(parts: Schemas) -> Schemas:
    fields = st.dictionaries(NAMES, parts, max_size=3)
    whole = fields.flatmap(
        lambda found: merged(
            TYPE["object"],
            st.just({"properties": found}),
            st.lists(st.sampled_from(["title", "extra", *found]), unique=True).map(lambda names: {"required": names}),
        )
    )
    return whole | merged(TYPE["array"], parts.map(lambda part: {"items": part}), COUNTS, DESCRIBED)


SCHEMAS: Schemas = st.dictionaries(NAMES, st.recursive(LEAVES, containers, max_leaves=6), max_size=4).map(
    lambda properties: {
        "type": "object",
        "properties": properties,
        "$defs": {"shared": {"type": "object", "properties": {"title": {"type": "string", "maxLength": 9}}}},
    }
)
TEXT_PARTS = st.sampled_from(
    ["Owls hunt.", "A. B", "# Top", "\n\n", "- 12 owls", "1,000.5", "Berlin is big", "…", "é", " "]
)
DOCUMENTS = st.lists(TEXT_PARTS, max_size=12).map(" ".join) | st.text(max_size=80) | st.just(ARTICLE)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, DOCUMENTS)
def test_every_answer_fits_its_schema(schema, text):
    check_schema(schema)
    validate_answer(Answerer(schema, Document.of(text), "what").answer(), schema)
