"""Idempotency keys of tool calls (HA-7)."""

import re

SEGMENT = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def require_segment(name: str, value: str) -> str:
    """Return a value that can be a segment of a key.

    Raises:
        ValueError: it cannot; names it, and says what is allowed. Nothing is normalised or hashed to make it fit.

    """
    if not SEGMENT.fullmatch(value):
        raise ValueError(f"{name}: 1 to 128 of A-Z a-z 0-9 _ . - are allowed, not {value!r:.80}")
    return value


class ToolCallKeys:
    """Makes `{prefix}:{run id}:{tool call id}`. Both ids are the caller's; nothing is generated here.

    Raises:
        ValueError: the prefix is no segment.

    """

    def __init__(self, prefix: str) -> None:
        self._prefix = require_segment("prefix", prefix)

    def key(self, run_id: str, tool_call_id: str) -> str:
        """Return the key of one tool call of one run.

        Raises:
            ValueError: an id is no segment.

        """
        return f"{self._prefix}:{require_segment('run_id', run_id)}:{require_segment('tool_call_id', tool_call_id)}"
