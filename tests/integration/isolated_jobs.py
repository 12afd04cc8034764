"""Job types for tests of where handlers run: plain functions, and handlers that end more than themselves."""

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, JsonValue

from aijobs.definition import Budget, Execution, JobDefinition, Metadata, Queue, Routing, Schema
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, RunOver
from aijobs.job_type import (
    Artifact,
    BlockingExecutionContext,
    BusinessRow,
    ExecutionContext,
    FollowUp,
    Message,
    ModelRequest,
    ProjectedJob,
    Projection,
    artifact_id,
)

REQUEST = ModelRequest(
    messages=[Message(role="user", content="Say something.")],
    output_schema={"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]},
    prompt_key="isolated",
    prompt_version="1",
)


class Wanted(BaseModel):
    do: str = "report"
    times: int = 1


class Found(BaseModel):
    pid: int = 0
    thread: str = ""
    environment: list[str] = []
    said: list[str] = []
    earlier: list[str] = []
    run_id: str = ""
    session_id: str = ""
    seconds_left: float = 0


def _found(context: Any, **values: Any) -> Found:
    return Found(
        pid=os.getpid(),
        thread=threading.current_thread().name,
        environment=sorted(name for name in os.environ if name.startswith("AIJOBS_")),
        earlier=[error.feedback for error in context.earlier_errors],
        run_id=context.run.run_id,
        session_id=context.run.session_id,
        seconds_left=context.harness.remaining(context.run).total_seconds(),
        **values,
    )


async def execute(context: ExecutionContext[Wanted]) -> BaseModel | JsonValue:
    """Do what the input says, as a coroutine."""
    match context.input.do:
        case "ask":
            answers = [await context.models.generate_json(REQUEST) for _ in range(context.input.times)]
            return _found(context, said=[str(answer["said"]) for answer in answers])
        case "progress":
            for percent in (10.4, 60):
                context.progress(percent)
                await asyncio.sleep(0.6)
            return _found(context)
        case "tools":
            for _ in range(context.input.times):
                context.harness.reserve_tool_call(context.run, "search")
            return _found(context)
        case "fail":
            if len(context.earlier_errors) < context.input.times:
                raise ExecutionFailed("VALIDATION_SCHEMA", "does not fit", feedback=f"try {context.execution}")
            return _found(context)
        case "hang" | "leave a child" as do:
            if do == "leave a child":
                subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - the misbehaviour it shows
            await asyncio.Event().wait()
            return None
        case _:
            return _misbehave(context)


def execute_blocking(context: BlockingExecutionContext[Wanted]) -> BaseModel | JsonValue:
    """Do what the input says, as a plain function."""
    match context.input.do:
        case "ask":
            answers = [context.models.generate_json(REQUEST) for _ in range(context.input.times)]
            return _found(context, said=[str(answer["said"]) for answer in answers])
        case "hang":
            time.sleep(600)
            return None
        case "stop iteration":
            raise StopIteration
        case _:
            return _misbehave(context)


#: What a handler says to the executor if it finds the connection: no JSON, a deep one, and what no frame may hold.
BABBLE = {
    "babble": b"\xff" * 100,
    "nonsense": b"[" * 100_000,
    "lie": b'{"progress": 1e999, "failed": {"code": 7}}',
    "half": b'{"number": 2, "result": {"text": 7}}',
    "overflow": b'{"progress": true, "call": 1, "request": {}}',
}


def _say(body: bytes) -> None:
    connection = int(sys.argv[1])  # as the child was told
    os.write(connection, len(body).to_bytes(4, "big") + body)


def _misbehave(context: Any) -> BaseModel | JsonValue:  # noqa: PLR0911, PLR0912 - a list of misdeeds
    match context.input.do:
        case "report" | "row":
            return _found(context)
        case "exit":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        case "system exit":
            raise SystemExit(4)
        case "hold the interpreter":
            # PyDLL calls without letting go of the interpreter's lock, as a bad extension would.
            ctypes.PyDLL(None).sleep(60)
        case "raise":
            raise LookupError("sk-canary")
        case "fork":
            if os.fork() == 0:
                time.sleep(0.3)
            return _found(context)
        case "close everything":
            os.closerange(3, 1000)
            return _found(context)
        case "nan":
            for percent in (math.nan, math.inf, -math.inf, 1e308):
                context.progress(percent)
            return _found(context)
        case "block":
            time.sleep(5)
            return _found(context)
        case "end its own run":
            context.harness.succeed(context.run)
            time.sleep(60)
        case "swallow":
            for _ in range(3):
                with suppress(BudgetExceeded, RunOver):
                    context.harness.reserve_tool_call(context.run, "search")
            return _found(context)
        case "orphan":
            # It inherits what it can, and outlives whoever has started it.
            subprocess.Popen(["sleep", "30"], close_fds=False)
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        case "huge":
            return Found(thread="x" * 20_000_000)
        case "flood":
            while True:
                _say(b'{"progress": 1, "x": [' + b"1," * 100_000 + b"1]}")
        case "babble" | "nonsense" | "lie" | "half" | "overflow" as do:
            _say(BABBLE[do])
            time.sleep(60)
        case "talk":
            sys.stdout.write("x" * 100_000)
            return _found(context)
    return None


def project(job: ProjectedJob, output: Found) -> Projection:
    """Keep where it ran, and call for another job if asked to."""
    assert isinstance(job.input, Wanted)
    if job.input.do == "fork":
        # Long enough for the copy to say its piece in the middle of this step.
        time.sleep(1)
    return Projection(
        artifacts=[
            Artifact(
                type="place",
                artifact_id=artifact_id(job.job_id, "place", 0),
                ordinal=0,
                # Where the projector itself ran.
                content={"pid": os.getpid(), "thread": output.thread},
            )
        ],
        follow_ups=[FollowUp(job_type="isolated", input={"do": "report"})] if job.input.do == "talk" else [],
        rows=[BusinessRow(writer="nobody", content={"a": 1})] if job.input.do == "row" else [],
    )


def definition(
    job_type: str, *, code: str = "execute", budget: Budget | None = None, **execution: Any
) -> JobDefinition:
    """Define a job type of this module."""
    return JobDefinition(
        job_type=job_type,
        metadata=Metadata(label="Isolated", description="For tests", domain="maintenance", version="1.0.0"),
        routing=Routing(queue=Queue.INTERACTIVE),
        execution=Execution(
            **{"timeout": timedelta(seconds=30), "max_retries": 2, "backoff": timedelta(milliseconds=10), **execution}
        ),
        input=Schema(version="1", model=Wanted),
        output=Schema(version="1", model=Found),
        executor=f"{__name__}:{code}",
        projector=f"{__name__}:project",
        budget=budget or Budget(),
    )


DEFINITIONS = [
    definition("isolated", isolation="process"),
    definition("isolated_brief", isolation="process", timeout=timedelta(seconds=4), max_retries=0),
    definition("isolated_blocking", code="execute_blocking", isolation="process"),
    definition("isolated_frugal", isolation="process", budget=Budget(model_calls=2, tool_calls_per_tool=2)),
    definition("plain", code="execute_blocking"),
    definition("plain_brief", code="execute_blocking", timeout=timedelta(seconds=1), max_retries=0),
    definition("shared"),
    definition("shared_frugal", budget=Budget(model_calls=2, tool_calls_per_tool=2)),
]
