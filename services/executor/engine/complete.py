"""COMPLETE: report the outcome, once, and learn what follows (EX-1)."""

from dataclasses import dataclass
from datetime import timedelta

import structlog

from aijobs.errors import CancelRequested, InvalidInput
from services.executor.engine.outcomes import Abandoned, Cancelled, Failed, Outcome, Succeeded
from services.executor.leases import Lease
from services.executor.lifecycle_client import LifecycleClient, Refused

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
        """Report an outcome and return what follows."""
        if isinstance(outcome, Abandoned):
            log.warning("run abandoned", job_id=lease.job_id, attempt=lease.attempt)
            return Ended()
        answer = await self._client.submit(lease, outcome)
        if isinstance(answer, Refused):
            return await self._refused(lease, execution, outcome, answer)
        # The outcome's own texts stay out of the log (AP-6).
        log.info(
            "run reported",
            job_id=lease.job_id,
            attempt=lease.attempt,
            outcome=type(outcome).__name__.lower(),
            code=outcome.code if isinstance(outcome, Failed) else None,
            state=answer.state,
        )
        return Ended() if answer.backoff is None else RunAgain(backoff=answer.backoff)

    async def _refused(
        self, lease: Lease, execution: int, outcome: Succeeded | Failed | Cancelled, refusal: Refused
    ) -> Ended | RunAgain:
        log.warning("report refused", job_id=lease.job_id, attempt=lease.attempt, reason=refusal.reason)
        match refusal.reason:
            case CancelRequested.reason if not isinstance(outcome, Cancelled):
                return await self(lease, execution, Cancelled())
            case InvalidInput.reason if isinstance(outcome, Succeeded):
                failed = Failed(
                    execution=execution, code="INTERNAL_RESULT_REFUSED", internal=refusal.message, feedback=""
                )
                return await self(lease, execution, failed)
            case _:
                return Ended()
