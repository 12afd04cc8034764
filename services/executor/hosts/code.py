"""The code of a job type and what is done with it in one execution, wherever that is.

Nothing that it raises leaves with its message: exceptions of validators, handlers and projectors may repeat what a user
wrote, so only their place goes on (AP-6).
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, JsonValue, ValidationError

from aijobs import canonical
from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, RunOver
from aijobs.identifiers import is_identifier
from aijobs.job_type import (
    Artifact,
    BlockingExecutionContext,
    BlockingExecutor,
    BlockingModelGateway,
    ExecutionContext,
    Executor,
    FollowUp,
    ModelGateway,
    ModelRequest,
    ProjectedJob,
    Projection,
    Projector,
)
from aijobs.logs import place_of
from services.executor import outcomes
from services.executor.handlers import HandlerExit
from services.executor.hosts.port import Facts, Means, Output, Projected

LONGEST_TYPE = 64
HIGHEST_ORDINAL = 2**31 - 1
T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTypeCode:
    """The loaded code of a job type."""

    job_type: str
    input: type[BaseModel]
    output: type[BaseModel]
    execute: Executor | BlockingExecutor
    project: Projector | None

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        code = self.execute
        return inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(type(code).__call__)


class ExecutionCode:
    """The code of a job type at work in one execution: input, then output, stay here between the steps."""

    def __init__(self, code: JobTypeCode) -> None:
        self._code = code
        self._input: BaseModel | None = None
        self._output: BaseModel | None = None

    def read_input(self, snapshot_json: str) -> None:
        """Implement `Host.read_input`."""
        try:
            self._input = self._code.input.model_validate_json(snapshot_json)
        except ValidationError as error:
            raise _unreadable(", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())) from error
        except Exception as error:  # whatever a validator raises; its message may repeat the snapshot
            raise _unreadable(place_of(error)) from error

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Implement `Host.execute`. A handler that is a plain function gets a thread of its own."""
        if not self._code.is_async:
            models = BlockingModels(means.models, asyncio.get_running_loop())
            return await in_a_thread(lambda: self.execute_here(facts, means, models), facts.job_type)
        execute: Any = self._code.execute
        with _said_by_place(facts):
            returned = await execute(ExecutionContext(models=means.models, **self._shared(facts, means)))
            return self._kept(returned)

    def execute_here(self, facts: Facts, means: Means, models: BlockingModelGateway) -> Output:
        """Call a handler that is a plain function, in this thread."""
        execute: Any = self._code.execute
        with _said_by_place(facts):
            return self._kept(execute(BlockingExecutionContext(models=models, **self._shared(facts, means))))

    def project(self, facts: Facts) -> Projected:
        """Implement `Host.project`."""
        try:
            projection = self._projection(facts)
            return Projected(
                artifacts=[_checked(artifact) for artifact in projection.artifacts],
                follow_ups=[_follow_up(follow_up) for follow_up in projection.follow_ups],
                rows=[
                    outcomes.ProjectedRow(writer=row.writer, content_json=canonical.dump(row.content))
                    for row in projection.rows
                ],
            )
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise ExecutionFailed("INTERNAL_PROJECTOR_ERROR", place_of(error)) from error

    def _shared(self, facts: Facts, means: Means) -> dict[str, Any]:
        return {
            "job_id": facts.job_id,
            "job_type": facts.job_type,
            "user_id": facts.user_id,
            "attempt": facts.attempt,
            "execution": facts.execution,
            "input": self._read,
            "progress": partial(_report, means.progress),
            "earlier_errors": tuple(facts.earlier_errors),
            "run": means.run,
            "harness": means.harness,
        }

    def _kept(self, returned: BaseModel | JsonValue) -> Output:
        self._output, text = _validated(self._code.output, returned)
        return Output(text=text, hash=canonical.digest(text))

    def _projection(self, facts: Facts) -> Projection:
        if self._code.project is None or self._output is None:
            return Projection()
        job = ProjectedJob(
            job_id=facts.job_id, job_type=facts.job_type, user_id=facts.user_id, depth=facts.depth, input=self._read
        )
        return self._code.project(job, self._output)

    @property
    def _read(self) -> BaseModel:
        if self._input is None:
            raise RuntimeError("the input is read first")
        return self._input


def _unreadable(why: str) -> ExecutionFailed:
    return ExecutionFailed("INTERNAL_SNAPSHOT_INVALID", f"snapshot does not fit: {why}")


@contextmanager
def _said_by_place(facts: Facts) -> Iterator[None]:
    """Turn what a handler raises into a failure that names its place."""
    try:
        yield
    except (ExecutionFailed, BudgetExceeded, RunOver):
        raise
    except Exception as error:
        place = place_of(error)
        log.warning("handler failed", job_id=facts.job_id, job_type=facts.job_type, error=place)
        raise ExecutionFailed("INTERNAL_HANDLER_ERROR", place) from error


class BlockingModels:
    """Models for a handler that is no coroutine: it waits in its own thread while the event loop asks."""

    def __init__(self, models: ModelGateway, loop: asyncio.AbstractEventLoop) -> None:
        self._models = models
        self._loop = loop

    def generate_json(self, request: ModelRequest) -> JsonObject:
        """Ask a model."""
        return asyncio.run_coroutine_threadsafe(self._models.generate_json(request), self._loop).result()


async def in_a_thread(work: Callable[[], T], name: str) -> T:
    """Call a function in a thread of its own.

    A thread cannot be stopped: cancelled, this leaves it behind, and it ends with the process at the latest. So it is
    none of a pool, whose places would be used up, and whose threads the end of the process would wait for.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(end: Callable[[], None]) -> None:
        if not done.done():
            end()

    def call() -> None:
        try:
            result = work()
            end = partial(done.set_result, result)
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            end = partial(done.set_exception, error)
        except BaseException as error:  # noqa: BLE001 - a SystemExit would end more than this
            end = partial(done.set_exception, HandlerExit(place_of(error)))
        # The loop may be closed: then the process ends.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, end)

    threading.Thread(target=call, name=f"handler {name}", daemon=True).start()
    return await done


def _report(progress: Callable[[int], None], percent: float) -> None:
    # Rounded here, where the author of the handler sees what is wrong with anything but a number.
    if not math.isnan(percent):  # the share of nothing: says nothing
        progress(round(max(0.0, min(100.0, percent))))


def _validated(model: type[BaseModel], returned: BaseModel | JsonValue) -> tuple[BaseModel, str]:
    try:
        if isinstance(returned, BaseModel):
            # Writing JSON, pydantic turns NaN into null without a word.
            _require_finite(returned.model_dump())
            output = model.model_validate(returned.model_dump(mode="json", by_alias=True))
        else:
            canonical.check(returned)
            output = model.model_validate(returned)
        return output, canonical.dump(output.model_dump(mode="json", by_alias=True))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'output'}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_context=False)[:10]
        )
        raise ExecutionFailed("VALIDATION_OUTPUT", "the output does not fit its schema", feedback=problems) from error
    except canonical.NotStrictJson as error:
        raise ExecutionFailed("VALIDATION_OUTPUT", "the output is not strict JSON", feedback=str(error)) from error


def _require_finite(value: Any) -> None:
    match value:
        case float() if not math.isfinite(value):
            raise canonical.NotStrictJson("not a finite number")
        case dict():
            for item in value.values():
                _require_finite(item)
        case list() | tuple() | set() | frozenset():
            for item in value:
                _require_finite(item)
        case _:
            pass


def _checked(artifact: Artifact) -> outcomes.ProjectedArtifact:
    """Refuse here, by the projector's name, what the jobs service would refuse."""
    if not (is_identifier(artifact.type, most=LONGEST_TYPE) and is_identifier(artifact.artifact_id)):
        raise ValueError("type or id of an artifact is no identifier")
    if not 0 <= artifact.ordinal <= HIGHEST_ORDINAL:
        raise ValueError("ordinal of an artifact is out of range")
    return outcomes.ProjectedArtifact(
        type=artifact.type,
        artifact_id=artifact.artifact_id,
        ordinal=artifact.ordinal,
        content_json=canonical.dump(artifact.content),
    )


def _follow_up(follow_up: FollowUp) -> outcomes.FollowUpJob:
    if not is_identifier(follow_up.job_type, most=LONGEST_TYPE):
        raise ValueError("job type of a follow-up job is no identifier")
    return outcomes.FollowUpJob(job_type=follow_up.job_type, input_json=canonical.dump(follow_up.input))
