"""One run of one job: PREPARE, then RESOLVE, EXECUTE, PROJECT for each execution, and COMPLETE (EX-1, EX-3).

    PREPARE ─▶ RESOLVE ─▶ EXECUTE ─▶ PROJECT ─▶ COMPLETE ─▶ ended
      │           ▲                                │
      refused     └──────────── again ─────────────┘   (the jobs service counts and decides, durably)

All retries of a job happen here, never in a library and never by broker redelivery. Each execution is a run of the
harness (HA-8): whatever ends it, a timer, a cancel, a budget or a lost lease, is written there first, and what is
reported follows from what is written.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count

import structlog

from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, CancellationReason, RunOver
from aijobs.job_type import EarlierError
from aijobs.logs import place_of
from services.executor.engine.complete import Complete, Ended, RunAgain
from services.executor.engine.ends import CANCELS, outcome_of
from services.executor.engine.execute import Execute
from services.executor.engine.prepare import Prepare
from services.executor.engine.project import Project
from services.executor.engine.resolve import Begun, Resolve
from services.executor.handlers import HandlerExit
from services.executor.heartbeats import Heartbeats
from services.executor.hosts.port import Facts
from services.executor.leases import Beat, LeasedJob, RunStopped
from services.executor.lifecycle_client import Refused
from services.executor.outcomes import Failed, Outcome, Released, Succeeded

#: A longer wait before the next execution is no reason to hold a slot: the run is given back meanwhile (EX-2).
LONGEST_HELD_WAIT = timedelta(seconds=30)
#: Errors of earlier executions that a handler is told, the latest ones.
MOST_EARLIER_ERRORS = 5
log = structlog.get_logger()


class Engine:
    """Runs jobs. Built from its stages; holds nothing between runs."""

    def __init__(
        self,
        *,
        prepare: Prepare,
        resolve: Resolve,
        execute: Execute,
        project: Project,
        complete: Complete,
        heartbeats: Heartbeats,
    ) -> None:
        self._prepare = prepare
        self._resolve = resolve
        self._execute = execute
        self._project = project
        self._complete = complete
        self._heartbeats = heartbeats

    async def run(self, job_id: str, *, going_on: Callable[[], bool], held_until: float) -> None:
        """Run a job to its end, or find that it is not ours to run. Afterwards its message can be acknowledged.

        Args:
            job_id: the job.
            going_on: False once this process takes no more jobs.
            held_until: how long its message may be held, by the loop's clock. A run whose next execution could take
                longer is given back, which dispatches it again and counts as nothing (ruling 17).

        Raises:
            AijobsError: the job could not be locked; its message must go back.

        """
        leased = await self._prepare(job_id, going_on=going_on)
        if isinstance(leased, Refused):
            log.info("job not taken", job_id=job_id, reason=leased.reason)
            return
        lease = leased.lease
        log.info("run started", job_id=job_id, job_type=leased.job_type, attempt=lease.attempt)
        with self._heartbeats.beating(leased) as beat:
            call_numbers = count(1)
            earlier_errors = list(leased.earlier_errors)
            if not self._fits(leased, timedelta(0), held_until):
                await self._report(beat, 1, Released(reason="message held for too long"))
                return
            for execution in count(1):
                outcome = await self._outcome(leased, execution, earlier_errors, call_numbers, beat)
                verdict = await self._report(beat, execution, outcome)
                if isinstance(verdict, Ended):
                    return
                if isinstance(outcome, Failed):
                    earlier_errors.append(EarlierError(code=outcome.code, feedback=outcome.feedback))
                if verdict.backoff > LONGEST_HELD_WAIT or not self._fits(leased, verdict.backoff, held_until):
                    await self._report(beat, execution, Released(reason="retry later", delay=verdict.backoff))
                    return
                waiting_since = asyncio.get_running_loop().time()
                try:
                    await beat.switch.sleep(verdict.backoff)
                except RunStopped as stopped:
                    ending = CANCELS[stopped.reason].outcome
                    if isinstance(ending, Released):
                        # Whoever goes on with it waits for the rest.
                        waited = timedelta(seconds=asyncio.get_running_loop().time() - waiting_since)
                        ending = replace(ending, delay=max(verdict.backoff - waited, timedelta(0)))
                    await self._report(beat, execution, ending)
                    return

    def _fits(self, leased: LeasedJob, wait: timedelta, held_until: float) -> bool:
        """Tell whether an execution that begins after a wait ends for certain while the message may be held."""
        longest = wait + self._resolve.timeout(leased.job_type)
        return asyncio.get_running_loop().time() + longest.total_seconds() <= held_until

    async def _report(self, beat: Beat, execution: int, outcome: Outcome) -> Ended | RunAgain:
        """Report an outcome, for as long as the lease is ours to report about."""
        beat.reporting = True
        try:
            return await beat.switch.while_held(self._complete(beat.lease, execution, outcome))
        except RunStopped:
            return Ended()
        finally:
            beat.reporting = False

    async def _outcome(
        self,
        leased: LeasedJob,
        execution: int,
        earlier_errors: Sequence[EarlierError],
        call_numbers: Iterator[int],
        beat: Beat,
    ) -> Outcome:
        """Run one execution, bounded by a run of the harness, and say how it ended."""
        facts = Facts(
            job_id=leased.lease.job_id,
            job_type=leased.job_type,
            user_id=leased.user_id,
            attempt=leased.lease.attempt,
            execution=execution,
            depth=leased.depth,
            earlier_errors=earlier_errors[-MOST_EARLIER_ERRORS:],
        )
        try:
            begun = self._resolve.begin(leased, facts, call_numbers)
        except ExecutionFailed as failure:
            return Failed.of(execution, failure)
        harness, run = begun.handler.harness, begun.run
        work = asyncio.ensure_future(self._succeed(begun, beat))
        with _bounded(begun, work, beat) as stop:
            try:
                await asyncio.wait({work})
            finally:
                if not work.done():  # cut off by the end of the process
                    stop(CancellationReason.INTERNAL_FAILURE)
                    await asyncio.wait({work})
        detail = _detail(work, facts)
        if isinstance(detail, Failed):
            harness.fail(run, detail.code)
        return outcome_of(run, detail, execution, beat.switch.reason)

    async def _succeed(self, begun: Begun, beat: Beat) -> Succeeded:
        """Go through the stages; everything that is somebody's code is inside of them."""
        harness, run = begun.handler.harness, begun.run
        host = self._resolve.host(begun)
        try:
            resolved = await self._resolve(begun, host)
            harness.check(run)
            output = await self._execute(resolved, beat.report_progress)
            harness.check(run)
            succeeded = await self._project(resolved, output)
        finally:
            await host.close()
        if not harness.succeed(run):
            harness.check(run)
        return succeeded


@contextmanager
def _bounded(
    begun: Begun, work: asyncio.Future[Succeeded], beat: Beat
) -> Iterator[Callable[[CancellationReason], None]]:
    """End an execution's run when its time is over, or when the job's run has to stop, and its work with it (EX-4).

    The harness is told first, so that whoever hears of it sees why. Yields what stops the execution.
    """
    harness, run, loop = begun.handler.harness, begun.run, asyncio.get_running_loop()

    stopped = False

    def stop_work() -> None:
        # Once: a second time would cut short what a handler is given for its end.
        nonlocal stopped
        if not stopped:
            stopped = True
            work.cancel()

    def stop(reason: CancellationReason) -> None:
        harness.cancel(run, reason)
        # Whether or not that ended the run: a handler that has ended it itself must not go on for ever.
        stop_work()

    def stop_too(_: CancellationReason) -> None:
        loop.call_soon_threadsafe(stop_work)

    # For what ends the run elsewhere: a budget.
    run.cancellation.on_cancel(stop_too)
    timer = loop.call_later(harness.remaining(run).total_seconds(), stop, CancellationReason.DEADLINE_EXCEEDED)
    try:
        with beat.switch.telling(lambda reason: stop(CANCELS[reason].reason)):
            yield stop
    finally:
        timer.cancel()


def _detail(work: asyncio.Future[Succeeded], facts: Facts) -> Succeeded | Failed:
    """Say what became of an execution's work, whatever the harness says about its run."""
    execution, job_id = facts.execution, facts.job_id
    try:
        return work.result()
    except BudgetExceeded as error:
        return Failed(execution=execution, code="BUDGET_EXHAUSTED", internal=str(error))
    except (asyncio.CancelledError, RunOver) as error:
        # The run says why it is over. Should it be over for no reason, that is a fault of ours.
        return Failed(execution=execution, code="INTERNAL_ENGINE_ERROR", internal=place_of(error))
    except ExecutionFailed as failure:
        return Failed.of(execution, failure)
    except HandlerExit as error:
        log.warning("handler failed", job_id=job_id, job_type=facts.job_type, error=str(error))
        return Failed(execution=execution, code="INTERNAL_HANDLER_ERROR", internal=str(error))
    except Exception as error:  # noqa: BLE001 - a fault of ours must fail the job, not strand it
        log.error("engine failed", job_id=job_id, error=place_of(error))
        return Failed(execution=execution, code="INTERNAL_ENGINE_ERROR", internal=place_of(error))
