"""EXECUTE: call the handler, validate what it returns, and hash it (EX-1, EX-5)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aijobs.harness import RunContext, RunState
from services.executor.engine.resolve import Resolved
from services.executor.hosts.port import Means, Output


class Execute:
    """The stage."""

    async def __call__(self, resolved: Resolved, progress: Callable[[int], None]) -> Output:
        """Run one execution.

        Raises:
            ExecutionFailed: `VALIDATION_OUTPUT`, `INTERNAL_HANDLER_ERROR`, or what the handler raised.

        """
        begun = resolved.begun
        report = _Progress(progress, begun.run, asyncio.get_running_loop())
        means = Means(run=begun.run, harness=begun.handler.harness, models=resolved.models, progress=report)
        return await resolved.host.execute(begun.facts, means)


@dataclass(frozen=True, slots=True)
class _Progress:
    """Brings what a handler reports to the main loop, until its run is over."""

    progress: Callable[[int], None]
    run: RunContext
    loop: asyncio.AbstractEventLoop

    def __call__(self, percent: int) -> None:
        """Report a percentage; from whatever thread."""
        if self.run.lifecycle.state is RunState.RUNNING:
            self.loop.call_soon_threadsafe(self.progress, percent)
