"""Cases M1 and M2: what a model may write around a JSON object, and what is refused."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.failures import ExecutionFailed
from services.executor.gateway.parsing import LARGEST_ANSWER, parse_answer

A = {"a": 1}
TICKS = "```"

READ = {
    "plain": ('{"a": 1}', A),
    "white space around": (' \n\t{"a": 1}\r\n ', A),
    "byte order mark": ('\ufeff{"a": 1}', A),
    "byte order mark after a blank": (' \ufeff {"a": 1}', A),
    "fence with a tag": (f'{TICKS}json\n{{"a": 1}}\n{TICKS}', A),
    "fence without a tag": (f'{TICKS}\n{{"a": 1}}\n{TICKS}', A),
    "fence with CRLF": (f'{TICKS}json\r\n{{"a": 1}}\r\n{TICKS}\r\n', A),
    "fence of four": (f'{TICKS}`\n{{"a": 1}}\n{TICKS}`', A),
    "indented fence": (f'  {TICKS}json\n  {{"a": 1}}\n  {TICKS}', A),
    "prose around a fence": (f'Here you are:\n{TICKS}json\n{{"a": 1}}\n{TICKS}\nAnything else?', A),
    "prose around": ('Sure! {"a": 1} Hope this helps.', A),
    "prose with quotes and brackets": ('He said "see [1]": {"a": 1} (really)', A),
    "prose with an apostrophe": ("Here's what I'd say: {\"a\": 1}", A),
    "back-ticks inside a string": (f'{{"a": "use {TICKS}x{TICKS}"}}', {"a": f"use {TICKS}x{TICKS}"}),
    "fence with back-ticks inside a string": (
        f'{TICKS}json\n{{"a": "\\n{TICKS}\\nx\\n{TICKS}"}}\n{TICKS}',
        {"a": f"\n{TICKS}\nx\n{TICKS}"},
    ),
    "unclosed fence": (f'{TICKS}json\n{{"a": 1}}', A),
    "unclosed fence and prose": (f'{TICKS}json\n{{"a": 1}}\nThat is all.', A),
    "fence on one line": (f'{TICKS}json {{"a": 1}} {TICKS}', A),
    "prose inside the fence": (f'{TICKS}\nAnswer: {{"a": 1}}\n{TICKS}', A),
    "thoughts before": ('<think>Is it {"a": 2}? No.</think>\n{"a": 1}', A),
    "thoughts before a fence": (f'<think>hm</think>{TICKS}json\n{{"a": 1}}\n{TICKS}', A),
    "braces inside a string": ('So: {"a": "} {", "b": "\\"}"}', {"a": "} {", "b": '"}'}),
    "nested objects": ('x {"a": {"b": {"c": [{}]}}} y', {"a": {"b": {"c": [{}]}}}),
    "empty object": ("{}", {}),
    "escaped surrogate pair": ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    "code block of another kind beside it": (f'{{"a": 1}}\n{TICKS}python\nprint(1)\n{TICKS}', A),
}

REFUSED = {
    "empty": ("", "NOT_JSON"),
    "prose alone": ("I cannot answer that.", "NOT_JSON"),
    "thoughts alone": ("<think>hm</think>", "NOT_JSON"),
    "thoughts without an end": ('<think>hm {"a": 1}', "NOT_JSON"),
    "trailing comma": ('{"a": 1,}', "NOT_JSON"),
    "trailing comma in a fence": (f'{TICKS}json\n{{"a": 1,}}\n{TICKS}', "NOT_JSON"),
    "single quotes": ("{'a': 1}", "NOT_JSON"),
    "comment": ('{"a": 1 /* one */}', "NOT_JSON"),
    "no end": ('{"a": 1', "NOT_JSON"),
    "no end of a string": ('{"a": "1}', "NOT_JSON"),
    "object inside an object without end": ('{"b": {"a": 1}', "NOT_JSON"),
    "top-level array": ('[{"a": 1}]', "NOT_AN_OBJECT"),
    "top-level array in prose": ('Here: [{"a": 1}]', "NOT_AN_OBJECT"),
    "top-level array in a fence": (f'{TICKS}json\n[{{"a": 1}}]\n{TICKS}', "NOT_AN_OBJECT"),
    "array with a trailing comma": ('[{"a": 1},]', "NOT_AN_OBJECT"),
    "array that is not strict": ('[{"a": 1}, NaN]', "NOT_AN_OBJECT"),
    "text": ('"a"', "NOT_AN_OBJECT"),
    "number": ("1", "NOT_AN_OBJECT"),
    "null": ("null", "NOT_AN_OBJECT"),
    "two objects": ('{"a": 1} {"a": 2}', "AMBIGUOUS"),
    "two objects on lines": ('{"a": 1}\n{"a": 2}', "AMBIGUOUS"),
    "two fences": (f'{TICKS}\n{{"a": 1}}\n{TICKS}\n{TICKS}\n{{"a": 2}}\n{TICKS}', "AMBIGUOUS"),
    "two equal fences": (f'{TICKS}\n{{"a": 1}}\n{TICKS}\n{TICKS}\n{{"a": 1}}\n{TICKS}', "AMBIGUOUS"),
    "two fences, one broken": (f'{TICKS}\n{{"a": 1}}\n{TICKS}\n{TICKS}\n{{"a": 2,}}\n{TICKS}', "AMBIGUOUS"),
    "two fences, one unclosed": (f'{TICKS}\n{{"a": 1}}\n{TICKS}\n{TICKS}\n{{"a": 2}}', "AMBIGUOUS"),
    "two objects in one fence": (f'{TICKS}\n{{"a": 1}}\n{{"a": 2}}\n{TICKS}', "AMBIGUOUS"),
    "an object beside a fence": (f'Not {{"a": 2}} but\n{TICKS}\n{{"a": 1}}\n{TICKS}', "AMBIGUOUS"),
    "two objects in prose, one broken": ('First {"a": 1,}, then {"a": 2}.', "AMBIGUOUS"),
    # M2
    "duplicate key": ('{"a": 1, "a": 2}', "NOT_JSON"),
    "duplicate key deep down": ('{"b": [{"c": {"a": 1, "a": 1}}]}', "NOT_JSON"),
    "duplicate key in a fence": (f'{TICKS}json\n{{"a": 1, "a": 2}}\n{TICKS}', "NOT_JSON"),
    "duplicate key by escape": ('{"a": 1, "\\u0061": 2}', "NOT_JSON"),
    "NaN": ('{"a": NaN}', "NOT_JSON"),
    "Infinity": ('{"a": -Infinity}', "NOT_JSON"),
    "overflow": ('{"a": 1e999}', "NOT_JSON"),
    "lone surrogate": ('{"a": "\\ud800"}', "NOT_JSON"),
    "lone surrogate in a key": ('{"\\udc00": 1}', "NOT_JSON"),
    "NUL": ('{"a": "\\u0000"}', "NOT_JSON"),
    "raw NUL": ('{"a": "\x00"}', "NOT_JSON"),
    "big integer": ('{"a": 9007199254740993}', "NOT_JSON"),
    "enormous integer": ('{"a": ' + "9" * 5000 + "}", "NOT_JSON"),
    "nested too deeply": ('{"a": ' + "[" * 200 + "]" * 200 + "}", "NOT_JSON"),
    "nested far too deeply": ('{"a":' * 100_000 + "1" + "}" * 100_000, "NOT_JSON"),
}


@pytest.mark.parametrize("case", READ)
def test_an_answer_is_read_exactly(case):
    text, value = READ[case]
    assert parse_answer(text, truncated=False) == value


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_is_refused_and_never_guessed(case):
    text, code = REFUSED[case]
    with pytest.raises(ExecutionFailed) as refusal:
        parse_answer(text, truncated=False)
    assert refusal.value.code == f"VALIDATION_{code}"
    assert refusal.value.feedback


@pytest.mark.parametrize("text", ['{"a": ', '{"a": 1}', ""])
def test_what_was_cut_off_is_never_trusted(text):
    with pytest.raises(ExecutionFailed) as refusal:
        parse_answer(text, truncated=True)
    assert refusal.value.code == "VALIDATION_TRUNCATED"


@pytest.mark.parametrize("letter", ["x", "é"])
def test_more_than_one_mebibyte_is_refused_in_bytes(letter):
    text = json.dumps({"a": letter * (LARGEST_ANSWER // len(letter.encode()))}, ensure_ascii=False)
    with pytest.raises(ExecutionFailed) as refusal:
        parse_answer(text, truncated=False)
    assert refusal.value.code == "VALIDATION_TOO_LARGE"


def test_the_internal_text_repeats_nothing_of_the_answer_and_the_feedback_little():
    canary = "canary" * 1000
    with pytest.raises(ExecutionFailed) as refusal:
        parse_answer(f'{{"{canary}": 1, "{canary}": 2}}', truncated=False)
    assert "canary" not in str(refusal.value)
    assert len(refusal.value.feedback) < 300


@pytest.mark.parametrize(
    "unit",
    ["{", "}", "[", '"', "{}", '{"', "`", f"{TICKS}\n", f"{TICKS}\n{{\n", "<think>", "\\", '{"a":[', "{ ", '"\\'],
)
def test_the_time_is_linear_in_the_length(unit):
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        start = time.perf_counter()
        with pytest.raises(ExecutionFailed):
            parse_answer(text, truncated=False)
        return time.perf_counter() - start

    # Quadratic would be minutes at this length.
    assert seconds(1_000_000) < 5


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), st.integers(-9, 9)),
    st.text(max_size=40),
    st.text(max_size=40),
)
def test_prose_around_an_object_gives_that_object_or_a_refusal(value, before, after):
    text = f"{before}{json.dumps(value, ensure_ascii=False)}{after}"
    try:
        read = parse_answer(text, truncated=False)
    except ExecutionFailed as refusal:
        assert refusal.code.startswith("VALIDATION_")  # noqa: PT017 - either is right
    else:
        assert read == value


@given(st.text(alphabet='{}[]":,`\\ \na1<think>/', max_size=60))
def test_no_text_breaks_the_parser(text):
    try:
        assert isinstance(parse_answer(text, truncated=False), dict)
    except ExecutionFailed as refusal:
        assert refusal.code.startswith("VALIDATION_")  # noqa: PT017 - either is right
