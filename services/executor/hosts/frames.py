"""What an executor and a process that runs one execution say to each other: JSON, each with its length before it.

    executor ─▶ child      start, then one step after the other; answers to model calls; cancel
    child ─▶ executor      ready; the end of each step; progress; model calls

The two are of the same version by nature: the executor starts the child from its own code.
"""

import json
import struct
from typing import Any, Final

from aijobs.failures import ExecutionFailed
from aijobs.job_type import Message, ModelRequest, ModelTier

Frame = dict[str, Any]
HEADER: Final = struct.Struct(">I")
#: Outputs are bounded by 2 MiB and prompts by a few; whatever is larger than this is no frame.
LARGEST_FRAME: Final = 64 * 1024 * 1024


def pack(frame: Frame) -> bytes:
    """Return a frame as bytes.

    Raises:
        ValueError: it is too large.

    """
    body = json.dumps(frame).encode()
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"{len(body)} bytes; at most {LARGEST_FRAME}")
    return HEADER.pack(len(body)) + body


def failure(error: ExecutionFailed) -> Frame:
    """Return a failure as a part of a frame."""
    return {"code": error.code, "internal": error.internal, "feedback": error.feedback}


def failed(frame: Frame) -> ExecutionFailed:
    """Return the failure in a part of a frame."""
    return ExecutionFailed(frame["code"], frame["internal"], feedback=frame["feedback"])


def request(asked: ModelRequest) -> Frame:
    """Return a question to a model as a part of a frame."""
    return {
        "messages": [[message.role, message.content] for message in asked.messages],
        "output_schema": asked.output_schema,
        "tier": asked.tier,
        "max_output_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "prompt_key": asked.prompt_key,
        "prompt_version": asked.prompt_version,
    }


def asked(frame: Frame) -> ModelRequest:
    """Return the question to a model in a part of a frame."""
    return ModelRequest(
        **{
            **frame,
            "messages": [Message(role=role, content=content) for role, content in frame["messages"]],
            "tier": ModelTier(frame["tier"]),
        }
    )
