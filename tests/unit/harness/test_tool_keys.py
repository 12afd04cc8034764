"""Keys of tool calls: made of what the caller gives, and of nothing else (HA-7)."""

import pytest

from aijobs.harness import ToolCallKeys

WRONG = ["", "a b", "a:b", "a/b", "ü", "a\n", "x" * 129]


def test_a_key_is_its_three_segments() -> None:
    keys = ToolCallKeys("tool.v1")
    assert keys.key("job-1.2.3", "Call_9") == "tool.v1:job-1.2.3:Call_9"
    assert keys.key("a" * 128, "b" * 128) == f"tool.v1:{'a' * 128}:{'b' * 128}"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_segment_that_does_not_fit_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        ToolCallKeys(wrong)
    with pytest.raises(ValueError, match="run_id"):
        ToolCallKeys("p").key(wrong, "call")
    with pytest.raises(ValueError, match="tool_call_id"):
        ToolCallKeys("p").key("run", wrong)
