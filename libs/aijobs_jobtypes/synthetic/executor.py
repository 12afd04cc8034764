"""Executor of the synthetic job: a list of misdeeds, each of them off unless asked for."""

import asyncio
import os
import signal
import time

from aijobs.failures import ExecutionFailed
from aijobs.job_type import ExecutionContext
from aijobs_jobtypes.synthetic.definition import SyntheticInput, SyntheticOutput


async def execute(context: ExecutionContext[SyntheticInput]) -> SyntheticOutput:
    """Do what the input says.

    Raises:
        ExecutionFailed: with `fail_code`, as long as fewer than `fail_times` executions of the job have failed.

    """
    wanted = context.input
    if wanted.sleep_ms or wanted.progress_steps:
        await _sleep(context)
    if wanted.block_ms:
        # Blocking the event loop is the point.
        time.sleep(wanted.block_ms / 1000)  # noqa: ASYNC251 - see above
    if wanted.kill and context.attempt <= wanted.kill_attempts:
        os.kill(os.getpid(), signal.SIGKILL)
    # The jobs service keeps the errors of the whole job. `execution` begins again with every attempt, and `attempt`
    # also rises when an executor dies or hands a run back; neither counts failures.
    failed = len(context.earlier_errors)
    if failed < wanted.fail_times:
        raise ExecutionFailed(wanted.fail_code, f"asked to fail: {failed + 1} of {wanted.fail_times}")
    return SyntheticOutput(echo=wanted.echo, executions=failed + 1, padding="x" * wanted.output_bytes)


async def _sleep(context: ExecutionContext[SyntheticInput]) -> None:
    wanted = context.input
    steps = max(1, wanted.progress_steps)
    for step in range(1, steps + 1):
        await _nap(wanted.sleep_ms / 1000 / steps, through=wanted.cancellation == "ignore")
        if wanted.progress_steps:
            context.progress(100 * step // steps)


async def _nap(seconds: float, *, through: bool) -> None:
    """Sleep; `through` every cancellation, so that the caller has to do without this task's consent."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        try:
            await asyncio.sleep(max(0, end - loop.time()))
        except asyncio.CancelledError:
            if not through:
                raise
        else:
            return
