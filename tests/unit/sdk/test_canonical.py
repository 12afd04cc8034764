"""Case M3 without the database: equal values hash alike, different ones do not."""

import pytest

from aijobs.canonical import NotStrictJson, digest, dump, parse


def hashed(text: str) -> str:
    return digest(dump(parse(text)))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('{"b": 1, "a": [2, {"d": 1, "c": 2}]}', '{"a":[2,{"c":2,"d":1}],"b":1}'),
        ("1.0", "1"),
        ("1e0", "1"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("1e-7", "1e-7"),
        ("0.0000001", "1e-7"),
        ("1E21", "1e+21"),
        ("9007199254740991", "9007199254740991"),
        ('"\\u00e9\\/\\u000a"', '"é/\\n"'),
        # By UTF-16 code units a surrogate pair sorts before U+FB33; by code points it would not.
        ('{"\\ufb33": 1, "\\ud83d\\ude00": 2}', '{"\U0001f600":2,"\ufb33":1}'),
    ],
)
def test_equal_values_have_one_text_and_one_hash(text, canonical):
    assert dump(parse(text)) == canonical
    assert hashed(text) == hashed(canonical)


def test_outputs_that_differ_in_a_nested_field_only_hash_differently():
    assert hashed('{"a": {"b": {"c": 1}}}') != hashed('{"a": {"b": {"c": 2}}}')


@pytest.mark.parametrize("text", ["9007199254740993", "-9007199254740992", '{"a": [9007199254740992]}'])
def test_an_integer_that_would_lose_digits_is_refused(text):
    with pytest.raises(NotStrictJson, match="integer beyond"):
        parse(text)
