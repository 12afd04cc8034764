"""Case M3 without the database: equal values hash alike, different ones do not."""

import json
import struct

import pytest

from aijobs.canonical import LARGEST_INTEGER, NotStrictJson, digest, dump, parse


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


#: RFC 8785, appendix B: doubles by their bits, and how they are written; None: not JSON.
DOUBLES = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "7fffffffffffffff": None,
    "7ff0000000000000": None,
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.parametrize("bits", DOUBLES)
def test_doubles_are_written_as_the_rfc_writes_them(bits: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    text = DOUBLES[bits]
    # What a reader would take for an integer beyond 2^53 - 1 is refused before it is written (ruling 35).
    if text is None or (text.lstrip("-").isdigit() and abs(int(text)) > LARGEST_INTEGER):
        with pytest.raises(NotStrictJson):
            dump(number)
    else:
        assert dump(number) == text


def test_the_example_of_the_rfc() -> None:
    """RFC 8785, section 3.2.2."""
    source = r"""{
      "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
      "literals": [null, true, false]
    }"""
    assert dump(parse(source)) == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA' + "'" + r'B\"\\\\\"/"}'
    )


def test_keys_are_sorted_as_the_rfc_sorts_them() -> None:
    """RFC 8785, section 3.2.3: by UTF-16 code units, so that a surrogate pair comes before U+FB33."""
    source = r'{"\u20ac": 5, "\r": 1, "\ufb33": 7, "1": 2, "\ud83d\ude00": 6, "\u0080": 3, "\u00f6": 4}'
    assert list(json.loads(dump(parse(source))).values()) == [1, 2, 3, 4, 5, 6, 7]
