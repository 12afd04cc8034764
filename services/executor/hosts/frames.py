"""What an executor and a process that runs one execution say to each other: JSON, each with its length before it.

    executor ─▶ child      start, then one step after the other; answers to model calls; cancel
    child ─▶ executor      the end of each step; progress; model calls

The two are of the same version by nature: the executor starts the child from its own code.
"""

import json
import struct
from datetime import timedelta
from typing import Any, Final

from aijobs.failures import ExecutionFailed
from aijobs.job_type import Message, ModelRequest, ModelTier

Frame = dict[str, Any]
HEADER: Final = struct.Struct(">I")
#: Results are bounded by 2 MiB, and so are prompts; whatever is larger than this is no frame.
LARGEST_FRAME: Final = 8 * 1024 * 1024
#: What one execution may say in all: reading it costs the executor time.
LARGEST_TALK: Final = 32 * 1024 * 1024
#: Model calls that one execution may have under way.
MOST_OPEN_CALLS: Final = 100


def pack(frame: Frame) -> bytes:
    """Return a frame as bytes.

    Raises:
        ValueError: it is too large.

    """
    # Lone surrogates, which a failure may hold, pass.
    body = json.dumps(frame, ensure_ascii=False).encode(errors="surrogatepass")
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"{len(body)} bytes; at most {LARGEST_FRAME}")
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Frame:
    """Return the frame in its bytes.

    Raises:
        ValueError: or RecursionError: it is none.

    """
    frame = json.loads(body.decode(errors="surrogatepass"))
    if not isinstance(frame, dict):
        raise ValueError("no object")  # noqa: TRY004 - one error for whatever is no frame
    return frame


def failure(error: ExecutionFailed) -> Frame:
    """Return a failure as a part of a frame."""
    wait = error.retry_after
    return {
        "code": error.code,
        "internal": error.internal,
        "feedback": error.feedback,
        "retry_after": None if wait is None else wait.total_seconds(),
    }


def failed(frame: Frame) -> ExecutionFailed:
    """Return the failure in a part of a frame."""
    wait = frame["retry_after"]
    return ExecutionFailed(
        frame["code"],
        frame["internal"],
        feedback=frame["feedback"],
        retry_after=None if wait is None else timedelta(seconds=wait),
    )


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
