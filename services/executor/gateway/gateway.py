"""The gateway that job types call: one request on the wire, one row in the ledger, one strict answer.

    open the row ─▶ ask the provider ─▶ settle the row ─▶ parse (EX-8) ─▶ validate
                          │ failed, cancelled                │ of no use
                          └─────────▶ settle the row ◀───────┘

Parsing comes before settling, because the row says whether the answer was of any use. Nothing is retried here:
executions are retried by the engine, each of them visible as a row (EX-3).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from aijobs.canonical import JsonObject
from aijobs.definition import CredentialMode
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, CancellationReason, Harness, RunContext
from aijobs.job_type import ModelRequest, ModelTier
from aijobs.schema import validate_answer
from services.executor.gateway.ledger import CallOpened, CallSettled, UsageLedger
from services.executor.gateway.parsing import parse_answer
from services.executor.gateway.provider import NO_USAGE, Provider, ProviderAnswer, ProviderCall, ProviderFailed, Usage

logger = logging.getLogger(__name__)

CANCELLED = "CANCELLED"
BROKEN = "INTERNAL_PROVIDER_ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a call ended: with an object or with a failure, and what it used."""

    usage: Usage
    result: JsonObject | ExecutionFailed

    @property
    def error_code(self) -> str:
        return self.result.code if isinstance(self.result, ExecutionFailed) else ""


class Gateway:
    """The gateway of one execution of a job; implements `aijobs.job_type.ModelGateway`.

    Args:
        provider: the provider that serves every tier.
        models: the model's name for each tier.
        ledger: keeps the rows of the attempt.
        harness: is asked before each call, and told what it used (HA-2).
        run: of the harness; what is left of a handler after its end calls no more models.
        credential_mode: whose key pays.
        call_numbers: numbers of the attempt's calls, from 1; the executions of an attempt share them.
        monotonic: seconds of a clock that never goes back, for latencies.
        call_timeout: bound of one call; without it the provider's own one holds.
        settle_bound: how long a cancelled task may wait for its row to be settled.

    """

    def __init__(
        self,
        *,
        provider: Provider,
        models: Mapping[ModelTier, str],
        ledger: UsageLedger,
        harness: Harness,
        run: RunContext,
        monotonic: Callable[[], float],
        credential_mode: CredentialMode = CredentialMode.PLATFORM_KEY,
        call_numbers: Iterator[int],
        call_timeout: timedelta | None = None,
        settle_bound: timedelta = timedelta(seconds=2),
    ) -> None:
        self._provider = provider
        self._models = models
        self._ledger = ledger
        self._harness = harness
        self._run = run
        self._monotonic = monotonic
        self._credential_mode = credential_mode
        self._numbers = call_numbers
        self._call_timeout = call_timeout
        self._settle_bound = settle_bound

    async def generate_json(self, request: ModelRequest) -> JsonObject:
        """Ask a model once; see `aijobs.job_type.ModelGateway`.

        Raises:
            RunOver: the execution is over.
            BudgetExceeded: it may make no such call, or has now used more than it may; it is over.
            ExecutionFailed: what the provider, the parser or the validator raised.
            asyncio.CancelledError: after the row was settled as CANCELLED, or `settle_bound` later.

        """
        self._harness.reserve_model_call(self._run)
        call = ProviderCall(
            model=self._models[request.tier],
            messages=request.messages,
            output_schema=request.output_schema,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            timeout=self._call_timeout,
        )
        row = CallOpened(
            call_no=next(self._numbers),
            provider=self._provider.name,
            model=call.model,
            tier=request.tier,
            prompt_key=request.prompt_key,
            prompt_version=request.prompt_version,
            credential_mode=self._credential_mode,
        )
        try:
            await self._to_its_end(self._ledger.opened(row))
        except asyncio.CancelledError as cancelled:
            await self._settle(row, NO_USAGE, timedelta(0), CANCELLED, cancelled)
            raise
        if self._run.lifecycle.termination is not None:
            # It ended while the row was being opened; nothing has been sent.
            await self._settle(row, NO_USAGE, timedelta(0), CANCELLED)
            self._harness.check(self._run)
        started = self._monotonic()
        try:
            ended = await self._until_over(self._ask(call))
        except asyncio.CancelledError as cancelled:
            # The prompt was sent, so it was paid for, most likely.
            ours = _is_cancelled()
            await self._settle(
                row, call.estimated_usage(), self._since(started), CANCELLED, cancelled if ours else None
            )
            self._harness.check(self._run)
            raise
        except Exception:
            await self._settle(row, NO_USAGE, self._since(started), BROKEN)
            raise
        await self._settle(row, ended.usage, self._since(started), ended.error_code)
        self._harness.check(self._run)
        if isinstance(ended.result, ExecutionFailed):
            raise ended.result
        return ended.result

    async def _until_over(self, asking: Coroutine[Any, Any, _Ended]) -> _Ended:
        """Ask, and end the call with its run: whoever waits for it may not hear of that by itself (EX-4).

        A handler in a thread is never cancelled, nor is what a handler has left behind.
        """
        task = asyncio.ensure_future(asking)
        loop = asyncio.get_running_loop()

        def stop(_: CancellationReason) -> None:
            loop.call_soon_threadsafe(task.cancel)

        forget = self._run.cancellation.on_cancel(stop)
        try:
            return await task
        finally:
            forget()

    async def _ask(self, call: ProviderCall) -> _Ended:
        try:
            answer = await self._provider.complete(call)
        except ProviderFailed as failure:
            return _Ended(usage=failure.usage, result=failure)
        except ExecutionFailed as failure:
            return _Ended(usage=NO_USAGE, result=failure)
        return _Ended(usage=answer.usage, result=_read(answer, call.output_schema))

    def _since(self, started: float) -> timedelta:
        return timedelta(seconds=self._monotonic() - started)

    async def _settle(
        self,
        row: CallOpened,
        usage: Usage,
        latency: timedelta,
        error_code: str,
        cancelled: asyncio.CancelledError | None = None,
    ) -> None:
        settled = CallSettled(opened=row, usage=usage, latency=latency, error_code=error_code)
        try:
            await self._to_its_end(self._ledger.settled(settled), cancelled)
        except asyncio.CancelledError:
            # The run is over anyway; what it used is recorded all the same.
            with suppress(BudgetExceeded):
                self._record(usage)
            raise
        # Only now: a breach ends the run, and with it this task.
        self._record(usage)

    def _record(self, usage: Usage) -> None:
        self._harness.record_tokens(self._run, input_tokens=usage.input_tokens, output_tokens=usage.output_tokens)

    async def _to_its_end(
        self, work: Coroutine[Any, Any, None], cancelled: asyncio.CancelledError | None = None
    ) -> None:
        """Await ledger work without tearing it when this task is cancelled: finish it first, within the bound.

        Args:
            work: what the ledger does.
            cancelled: the task is being cancelled already.

        Raises:
            asyncio.CancelledError: the task was cancelled before or meanwhile.
            Exception: what the ledger raised, if the task was not cancelled.

        """
        loop = asyncio.get_running_loop()
        bound = self._settle_bound.total_seconds()
        deadline = loop.time() + bound
        task = loop.create_task(work)
        while not task.done():
            try:
                await asyncio.wait({task}, timeout=max(0, deadline - loop.time()) if cancelled else None)
            except asyncio.CancelledError as error:
                # Cancelled again while finishing: the first bound goes on.
                if cancelled is None:
                    cancelled, deadline = error, loop.time() + bound
            if cancelled and loop.time() >= deadline:
                break
        if cancelled is None:
            return task.result()
        if not task.done():
            task.cancel()
            logger.warning("a usage row was not stored in time while its run was being cancelled")
        elif not task.cancelled() and (failure := task.exception()) is not None:
            logger.warning("a usage row was not stored while its run was being cancelled: %s", type(failure).__name__)
        raise cancelled


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _read(answer: ProviderAnswer, schema: JsonObject) -> JsonObject | ExecutionFailed:
    try:
        value = parse_answer(answer.text, truncated=answer.truncated)
        validate_answer(value, schema)
    except ExecutionFailed as failure:
        return failure
    return value
