"""W3C Trace Context: what is a traceparent, and what is none and harms nobody."""

import pytest

from aijobs.tracing import trace_id, valid_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize("value", [GOOD, f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what-comes-later"])
def test_a_traceparent_is_carried_as_it_is(value: str) -> None:
    assert valid_traceparent([value]) == value
    assert trace_id(value) == TRACE


@pytest.mark.parametrize(
    "values",
    [
        [],
        [GOOD, GOOD],
        [""],
        ["nonsense"],
        [GOOD.upper()],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE}-{PARENT}"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        [f"00-{TRACE}-{PARENT}-01\n"],
        [f"cc-{TRACE}-{PARENT}-01-{'x' * 500}"],
        [f"cc-{TRACE}-{PARENT}-01-ü"],
    ],
)
def test_anything_else_is_none(values: list[str]) -> None:
    assert valid_traceparent(values) is None


def test_what_is_no_traceparent_has_no_id() -> None:
    assert trace_id("") == trace_id("nonsense") == ""
