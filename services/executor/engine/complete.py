"""COMPLETE: report the outcome and learn what follows (EX-1)."""

from dataclasses import dataclass
from datetime import timedelta

import structlog

from aijobs.errors import AijobsError, CancelRequested, IllegalTransition, JobNotFound, LeaseLost
from aijobs.logs import place_of
from services.executor.leases import Lease
from services.executor.lifecycle_client import Accepted, LifecycleClient, Refused
from services.executor.outcomes import Abandoned, Cancelled, Failed, Outcome, Report, Succeeded

#: The run is over for us, whatever we think of it.
NO_LONGER_OURS = frozenset({LeaseLost.reason, JobNotFound.reason, IllegalTransition.reason})
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over; its message can be acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgain:
    """Another execution follows after a wait."""

    backoff: timedelta


class Complete:
    """The stage."""

    def __init__(self, client: LifecycleClient) -> None:
        self._client = client

    async def __call__(self, lease: Lease, execution: int, outcome: Outcome) -> Ended | RunAgain:
        """Report an outcome and return what follows.

        A report that is not taken as it is, is followed by the one that remains: a cancel to confirm, or a failure
        that says so. If that is not taken either, the run ends unreported, and its lease runs out.
        """
        if isinstance(outcome, Abandoned):
            log.warning("run abandoned", job_id=lease.job_id, attempt=lease.attempt)
            return Ended()
        answer = await self._report(lease, outcome)
        if isinstance(answer, Refused) and answer.reason not in NO_LONGER_OURS:
            answer = await self._report(lease, _instead(execution, outcome, answer))
        if isinstance(answer, Refused):
            if answer.reason not in NO_LONGER_OURS:
                log.error("run ends unreported", job_id=lease.job_id, attempt=lease.attempt, reason=answer.reason)
            return Ended()
        return Ended() if answer.backoff is None else RunAgain(backoff=answer.backoff)

    async def _report(self, lease: Lease, outcome: Report) -> Accepted | Refused:
        try:
            answer = await self._client.submit(lease, outcome)
        except AijobsError as error:
            answer = Refused(reason=error.reason, message=error.message)
        except Exception as error:  # noqa: BLE001 - a report that cannot be built must fail the job, not strand it
            answer = Refused(reason="INTERNAL", message=place_of(error))
        # What users and models wrote stays out of the log (AP-6).
        report = log.bind(
            job_id=lease.job_id,
            attempt=lease.attempt,
            outcome=type(outcome).__name__.lower(),
            code=outcome.code if isinstance(outcome, Failed) else None,
        )
        if isinstance(outcome, Failed):
            # For operators, as whoever raises it is told: no key, prompt or answer (AP-6).
            report.warning("execution failed", execution=outcome.execution, why=outcome.internal)
        if isinstance(answer, Refused):
            report.warning("report refused", reason=answer.reason)
        else:
            report.info("run reported", state=answer.state)
        return answer


def _instead(execution: int, outcome: Outcome, refusal: Refused) -> Failed | Cancelled:
    """Choose what is left to report. The refusal's text may repeat keys of the output, so only its reason goes on."""
    if refusal.reason == CancelRequested.reason:
        return Cancelled()
    code = "INTERNAL_RESULT_REFUSED" if isinstance(outcome, Succeeded) else "INTERNAL_REPORT_REFUSED"
    return Failed(execution=execution, code=code, internal=f"refused: {refusal.reason}")
