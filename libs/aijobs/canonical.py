"""Strict JSON in, canonical JSON out (EX-5, EX-8, rulings 3 and 35).

Reading refuses what JSON parsers usually let through: duplicate keys, NaN and infinities, numbers that overflow, lone
surrogates and NUL. Writing follows RFC 8785, so that equal values have equal texts and equal hashes.
"""

import hashlib
import json
import math
from collections import Counter
from typing import NoReturn, TypeAlias

import rfc8785
from pydantic import JsonValue

JsonObject: TypeAlias = dict[str, JsonValue]

#: RFC 8785 carries numbers as IEEE 754 doubles: integers beyond this lose digits (ruling 35).
LARGEST_INTEGER = 2**53 - 1
#: Characters; more than any integer within the limit has.
LONGEST_INTEGER = 40
#: Floats below this have no exponent in RFC 8785.
WRITTEN_AS_INTEGER = 1e21
#: Deeper nesting is refused instead of exhausting the stack of some later reader.
DEEPEST_NESTING = 100


class NotStrictJson(ValueError):
    """A text is no JSON, or JSON that cannot be stored and hashed faithfully. The message says what and where."""


def parse(text: str) -> JsonValue:
    """Read one JSON value that fills `text`.

    Raises:
        NotStrictJson: broken syntax, trailing text, duplicate key, NaN, Infinity, a number or an integer out of range,
            a lone surrogate, NUL, or nesting deeper than 100.

    """
    try:
        value: JsonValue = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise NotStrictJson(f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise NotStrictJson(f"nested deeper than {DEEPEST_NESTING}") from error
    except ValueError as error:
        raise NotStrictJson(str(error)) from error
    check(value)
    return value


def check(value: JsonValue, path: str = "$", depth: int = 0) -> None:
    """Refuse a value that RFC 8785 cannot carry or a database would not give back as it was.

    Raises:
        NotStrictJson: see `parse`; `path` names the place, for example `$.items[3].name`.

    """
    if depth > DEEPEST_NESTING:
        raise NotStrictJson(f"nested deeper than {DEEPEST_NESTING}")
    match value:
        case None | bool():
            return
        case int() | float():
            _check_number(value, path)
        case str():
            _check_text(value, path)
        case list():
            for index, item in enumerate(value):
                check(item, f"{path}[{index}]", depth + 1)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise NotStrictJson(f"{path}: a key that is no text")
                _check_text(key, path)
                check(item, f"{path}.{key}", depth + 1)
        case _:
            raise NotStrictJson(f"{path}: a {type(value).__name__} is no JSON")


def dump(value: JsonValue) -> str:
    """Return the RFC 8785 text of a value.

    Raises:
        NotStrictJson: the value is not strict JSON.

    """
    check(value)
    return rfc8785.dumps(value).decode()


def digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, as 64 hex digits. Over `dump(output)` it is the output hash (EX-5)."""
    return hashlib.sha256(text.encode()).hexdigest()


def _object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotStrictJson(f"duplicate key {twice!r}")
    return result


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise NotStrictJson("integer beyond ±(2^53 - 1); send it as a string")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise NotStrictJson(f"{name} is not JSON")


def _check_number(number: float, path: str) -> None:
    if isinstance(number, int):
        if abs(number) > LARGEST_INTEGER:
            raise NotStrictJson(f"{path}: integer beyond ±(2^53 - 1); send it as a string")
    elif not math.isfinite(number):
        raise NotStrictJson(f"{path}: not a finite number")
    elif number.is_integer() and LARGEST_INTEGER < abs(number) < WRITTEN_AS_INTEGER:
        # RFC 8785 writes it with all its digits and no point: whoever reads it back reads an integer.
        raise NotStrictJson(f"{path}: integer beyond ±(2^53 - 1); send it as a string")


def _check_text(text: str, path: str) -> None:
    if "\x00" in text:
        raise NotStrictJson(f"{path}: NUL character")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise NotStrictJson(f"{path}: lone surrogate")
