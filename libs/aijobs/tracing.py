"""The caller's trace, carried along a job's way: create, event, message, run (OB-1, OB-9).

What is carried is a `traceparent` of W3C Trace Context (https://www.w3.org/TR/trace-context/), unchanged: there are no
spans of our own yet. One that is not valid is none, as that standard says: no request fails by it.
"""

import re
from collections.abc import Sequence

#: Name of the gRPC metadata entry and of the AMQP header.
TRACEPARENT = "traceparent"
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)
_LONGEST = 512


def valid_traceparent(values: Sequence[str]) -> str | None:
    """Return the one value that is a traceparent; None if there is none, or more than one."""
    if len(values) != 1 or len(values[0]) > _LONGEST or not values[0].isascii():
        return None
    found = _PARENT.fullmatch(values[0])
    # Version 00 ends after its flags; later ones may go on.
    if found is None or (found["more"] and values[0].startswith("00")):
        return None
    return values[0]


def trace_id(traceparent: str) -> str:
    """Return the id of a trace, 32 hex digits, for logs; empty if there is none."""
    found = _PARENT.fullmatch(traceparent)
    return found["trace"] if found else ""
