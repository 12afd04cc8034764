"""EXECUTE: call the handler, validate what it returns, and hash it (EX-1, EX-5)."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import BaseModel, JsonValue, ValidationError

from aijobs import canonical
from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.job_type import EarlierError, ExecutionContext
from aijobs.logs import place_of
from services.executor.engine.resolve import Resolved
from services.executor.handlers import HandlerLoop

#: Errors of earlier executions that a handler is told, the latest ones.
MOST_EARLIER_ERRORS = 5
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A validated output, its canonical text and the hash of that text."""

    resolved: Resolved
    output: BaseModel
    output_json: str
    output_hash: str


class Execute:
    """The stage."""

    def __init__(self, handlers: HandlerLoop) -> None:
        self._handlers = handlers

    async def __call__(
        self,
        resolved: Resolved,
        execution: int,
        earlier_errors: Sequence[EarlierError],
        progress: Callable[[int], None],
    ) -> Executed:
        """Run one execution.

        Raises:
            ExecutionFailed: `VALIDATION_OUTPUT`, `INTERNAL_HANDLER_ERROR`, or what the handler raised.

        """
        leased = resolved.leased
        report = _Progress(progress, asyncio.get_running_loop())

        def close() -> None:
            report.open = False
            resolved.models.close()

        context = ExecutionContext(
            job_id=leased.lease.job_id,
            job_type=leased.job_type,
            user_id=leased.user_id,
            attempt=leased.lease.attempt,
            execution=execution,
            input=resolved.input,
            models=resolved.models,
            progress=report,
            earlier_errors=tuple(earlier_errors)[-MOST_EARLIER_ERRORS:],
        )
        try:
            # Closed before the handler hears of its end: one that goes on all the same must not go on to spend or
            # to report progress.
            return await self._handlers.run(lambda: _executed(resolved, context), leased.job_type, before_cancel=close)
        finally:
            close()


async def _executed(resolved: Resolved, context: ExecutionContext[Any]) -> Executed:
    """Call the handler and validate, both on the handlers' loop: output models are somebody's code too."""
    try:
        returned = await resolved.handler.execute(context)
        output, text = _validated(resolved.handler.definition, returned)
    except ExecutionFailed:
        raise
    except Exception as error:
        # The message of an exception may repeat what a user wrote, so only its place leaves the process.
        place = place_of(error)
        log.warning("handler failed", job_id=context.job_id, job_type=context.job_type, error=place)
        raise ExecutionFailed("INTERNAL_HANDLER_ERROR", place) from error
    return Executed(resolved=resolved, output=output, output_json=text, output_hash=canonical.digest(text))


def _validated(definition: JobDefinition, returned: BaseModel | JsonValue) -> tuple[BaseModel, str]:
    try:
        if isinstance(returned, BaseModel):
            # Writing JSON, pydantic turns NaN into null without a word.
            _require_finite(returned.model_dump())
            output = definition.output.model.model_validate(returned.model_dump(mode="json", by_alias=True))
        else:
            canonical.check(returned)
            output = definition.output.model.model_validate(returned)
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


@dataclass(slots=True, eq=False)
class _Progress:
    """Brings what a handler reports to the main loop, until its execution is over."""

    progress: Callable[[int], None]
    loop: asyncio.AbstractEventLoop
    open: bool = True

    def __call__(self, percent: float) -> None:
        """Report a percentage."""
        # Rounded here, where the author of the handler sees what is wrong with anything but a number.
        rounded = max(0, min(100, round(percent)))
        if self.open:
            self.loop.call_soon_threadsafe(self.progress, rounded)
