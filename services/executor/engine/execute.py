"""EXECUTE: call the handler within its time, validate what it returns, and hash it (EX-1, EX-4, EX-5)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from pydantic import BaseModel, JsonValue, ValidationError

from aijobs import canonical
from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.job_type import EarlierError, ExecutionContext, ProgressReport
from services.executor.engine.resolve import Resolved
from services.executor.handlers import HandlerLoop

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
            ExecutionFailed: `TIMEOUT`, `VALIDATION_OUTPUT`, `INTERNAL_HANDLER_ERROR`, or what the handler raised.

        """
        leased, handler = resolved.leased, resolved.handler
        context = ExecutionContext(
            job_id=leased.lease.job_id,
            job_type=leased.job_type,
            user_id=leased.user_id,
            attempt=leased.lease.attempt,
            execution=execution,
            input=resolved.input,
            models=resolved.models,
            progress=_across_threads(progress),
            earlier_errors=tuple(earlier_errors),
        )
        timeout = handler.definition.execution.timeout
        deadline = asyncio.timeout(timeout.total_seconds())
        try:
            async with deadline:
                returned = await self._handlers.run(lambda: handler.execute(context), leased.job_type)
        except ExecutionFailed:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ExecutionFailed("TIMEOUT", f"not done within {timeout.total_seconds():g} s") from error
            # The traceback is for operators; it may name values of the job, so only its type leaves the process.
            log.warning("handler failed", job_id=leased.lease.job_id, job_type=leased.job_type, error=_where(error))
            raise ExecutionFailed("INTERNAL_HANDLER_ERROR", _where(error)) from error
        output, text = _validated(handler.definition, returned)
        return Executed(resolved=resolved, output=output, output_json=text, output_hash=canonical.digest(text))


def _validated(definition: JobDefinition, returned: BaseModel | JsonValue) -> tuple[BaseModel, str]:
    try:
        value = returned.model_dump(mode="json", by_alias=True) if isinstance(returned, BaseModel) else returned
        output = definition.output.model.model_validate(value)
        return output, canonical.dump(output.model_dump(mode="json", by_alias=True))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'output'}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_context=False)[:10]
        )
        raise ExecutionFailed("VALIDATION_OUTPUT", "the output does not fit its schema", feedback=problems) from error
    except canonical.NotStrictJson as error:
        raise ExecutionFailed("VALIDATION_OUTPUT", "the output is not strict JSON", feedback=str(error)) from error


def _across_threads(progress: Callable[[int], None]) -> ProgressReport:
    loop = asyncio.get_running_loop()

    def report(percent: int) -> None:
        loop.call_soon_threadsafe(progress, percent)

    return report


def _where(error: BaseException) -> str:
    """Name an exception and the line that raised it, without its message: that may repeat what a user wrote."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}{place}"
