"""Job types whose handlers do what they should not, for tests of the engine."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema
from aijobs.failures import ExecutionFailed
from aijobs.job_type import Artifact, ExecutionContext, ModelRequest, ProjectedJob, Projection, artifact_id

SECRET = "the learner wrote this"


class Odd(BaseModel):
    model_config = ConfigDict(extra="forbid")

    do: str
    times: int = 99


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: JsonValue = None
    numbers: list[int] = Field(default_factory=list)


async def _raise(context: ExecutionContext[Odd]) -> JsonValue:
    raise LookupError(f"{SECRET} {context.job_id}")


async def _timeout_error(context: ExecutionContext[Odd]) -> JsonValue:
    raise TimeoutError("some inner time limit")


async def _hang(context: ExecutionContext[Odd]) -> JsonValue:
    await asyncio.Event().wait()
    return None


async def _fail(context: ExecutionContext[Odd]) -> JsonValue:
    if len(context.earlier_errors) < context.input.times:
        raise ExecutionFailed("VALIDATION_SCHEMA", "does not fit", feedback=f"try {context.execution}")
    return {"value": [error.feedback for error in context.earlier_errors]}


async def _fail_slowly(context: ExecutionContext[Odd]) -> JsonValue:
    await asyncio.sleep(2.5)
    return await _fail(context)


async def _model(context: ExecutionContext[Odd]) -> BaseModel:
    return Output(value="from a model", numbers=[3, 1])


async def _model_with_nan(context: ExecutionContext[Odd]) -> BaseModel:
    return Output.model_construct(value=[{"deep": float("nan")}], numbers=[])


async def _generator_exit(context: ExecutionContext[Odd]) -> JsonValue:
    raise GeneratorExit


async def _progress(context: ExecutionContext[Odd]) -> JsonValue:
    for percent in (-5, 10, 60, 250):
        context.progress(percent)
        await asyncio.sleep(0.6)
    return {}


async def _cancels_itself(context: ExecutionContext[Odd]) -> JsonValue:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner
    return None


async def _bad_code(context: ExecutionContext[Odd]) -> JsonValue:
    raise ExecutionFailed("Provider down", "no code of the taxonomy")


async def _surrogates(context: ExecutionContext[Odd]) -> JsonValue:
    raise ExecutionFailed("CREDENTIAL_ODD", "lone \ud800 surrogate", feedback="\ud800" + "x" * 5_000_000)


async def _float_progress(context: ExecutionContext[Odd]) -> JsonValue:
    context.progress(33.3)
    return {}


async def _spend_on(context: ExecutionContext[Odd]) -> JsonValue:
    """Go on after the end, and ask for a model."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    try:
        await context.models.generate_json(ModelRequest(messages=[], output_schema={"type": "object"}))
    except Exception as error:
        SPENT.append(type(error).__name__)
        raise
    SPENT.append("a model was asked")
    return None


#: What became of the calls of handlers that went on after their run.
SPENT: list[str] = []


RETURNS: dict[str, JsonValue | object] = {
    "return_nothing": None,
    "return_text": "no object",
    "return_extra_key": {"value": 1, "unknown": 2},
    "return_wrong_type": {"numbers": ["many"]},
    "return_set": {"value": {1, 2}},
    "return_key_that_is_no_text": {"value": {None: 1}},
    "return_nan": {"value": float("nan")},
    "return_infinity": {"value": [float("inf")]},
    "return_large_integer": {"value": 2**60},
    "return_large_float": {"value": 1e16},
    "return_surrogate": {"value": "\ud800"},
    "return_nul": {"value": "a\x00b"},
    "return_too_much": {"value": "x" * (2 * 1024 * 1024 + 1)},
    "return_object_that_is_no_json": {"value": object()},
    "return_deep": {"value": [[[[["deep"]]]]]},
    "return_bad_ordinal": {"value": "bad ordinal"},
    "return_bad_type": {"value": "bad type"},
    "return_endless": {"value": "endless"},
    "return_ok": {"value": {"b": 1, "a": 2.0}, "numbers": [1]},
}
HANDLERS: dict[str, Callable[[ExecutionContext[Odd]], Any]] = {
    "raise": _raise,
    "timeout_error": _timeout_error,
    "hang": _hang,
    "fail": _fail,
    "fail_slowly": _fail_slowly,
    "model": _model,
    "progress": _progress,
    "model_with_nan": _model_with_nan,
    "generator_exit": _generator_exit,
    "cancels_itself": _cancels_itself,
    "bad_code": _bad_code,
    "surrogates": _surrogates,
    "float_progress": _float_progress,
    "spend_on": _spend_on,
}


async def execute(context: ExecutionContext[Odd]) -> Any:
    """Do what the input says."""
    if context.input.do in HANDLERS:
        return await HANDLERS[context.input.do](context)
    return RETURNS[context.input.do]


def project(job: ProjectedJob, output: BaseModel) -> Projection:
    """Make two artifacts, or fail in the ways that projectors fail."""
    assert isinstance(job.input, Odd)
    assert isinstance(output, Output)
    if output.numbers == [3, 1]:
        raise ZeroDivisionError(SECRET)
    if output.value == "bad ordinal":
        return Projection(artifacts=[Artifact(type="odd", artifact_id="a", ordinal=2**40, content={})])
    if output.value == "bad type":
        return Projection(artifacts=[Artifact(type="x" * 65, artifact_id="a", ordinal=0, content={})])
    if output.value == "endless":
        time.sleep(3)
    if output.numbers == [1]:
        content: JsonValue = output.value
        return Projection(
            artifacts=[
                Artifact(type="odd", artifact_id=artifact_id(job.job_id, "odd", n), ordinal=n, content=content)
                for n in range(2)
            ]
        )
    return Projection()


def definition(job_type: str, *, projects: bool = False, **execution: Any) -> JobDefinition:
    """Define an odd job type with quick retries."""
    return JobDefinition(
        job_type=job_type,
        metadata=Metadata(label="Odd", description="For tests", domain="maintenance", version="1.0.0"),
        routing=Routing(queue=Queue.INTERACTIVE),
        execution=Execution(
            **{
                "timeout": timedelta(seconds=30),
                "max_retries": 2,
                "backoff": timedelta(milliseconds=10),
                **execution,
            }
        ),
        input=Schema(version="1", model=Odd),
        output=Schema(version="1", model=Output),
        executor=f"{__name__}:execute",
        projector=f"{__name__}:project" if projects else None,
    )


DEFINITIONS = [
    definition("odd"),
    definition("odd_projected", projects=True),
    definition("odd_brief_projected", projects=True, timeout=timedelta(seconds=1), max_retries=0),
    definition("odd_brief", timeout=timedelta(seconds=1), abort_strategy="retry", max_retries=1),
    definition("odd_slow", timeout=timedelta(seconds=4)),
    definition("odd_brief_once", timeout=timedelta(seconds=1), abort_strategy="fail"),
]
