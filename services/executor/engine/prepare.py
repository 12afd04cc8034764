"""PREPARE: take the job's lease (EX-1, LC-4)."""

from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

import structlog

from aijobs.backoff import Backoff
from aijobs.errors import (
    AijobsError,
    IllegalTransition,
    InternalError,
    JobNotFound,
    JobNotReady,
    LeaseConflict,
    SessionLost,
    ShuttingDown,
)
from services.executor.leases import LeasedJob
from services.executor.lifecycle_client import LifecycleClient, Refused

NOT_OURS = frozenset({JobNotFound.reason, IllegalTransition.reason, LeaseConflict.reason, JobNotReady.reason})
log = structlog.get_logger()


class SessionPort(Protocol):
    """The executor's session as a lock sees it."""

    async def epoch(self) -> int:
        """Return the epoch of the open session.

        Raises:
            AijobsError: there is none at the moment.

        """
        ...

    def lost(self, epoch: int) -> None:
        """Say that the jobs service no longer knows a session."""
        ...


class Prepare:
    """The stage. The lease token is made here, once per run, so that a repeated lock gets the same lease."""

    def __init__(
        self, client: LifecycleClient, session: SessionPort, make_token: Callable[[], str] = lambda: uuid4().hex
    ) -> None:
        self._client = client
        self._session = session
        self._make_token = make_token

    async def __call__(self, job_id: str, *, going_on: Callable[[], bool]) -> LeasedJob | Refused:
        """Lock the job, trying as long as the jobs service is merely away.

        A refusal means that the job is not ours to run: it has ended, somebody else has it, there is none, or it cannot
        start now and was dispatched again.

        Args:
            job_id: the job.
            going_on: False once this process takes no more jobs; asked before each try, never in the middle of one,
                because a lock whose answer is not awaited may have been granted.

        Raises:
            AijobsError: the lock as such is not possible now; the job may still wait for one.

        """
        token = self._make_token()
        backoff = Backoff()
        while True:
            if not going_on():
                raise ShuttingDown
            try:
                epoch = await self._session.epoch()
                leased = await self._client.lock(job_id, token, epoch)
            except AijobsError as error:
                if not error.transient:
                    raise
                log.warning("job not locked yet", job_id=job_id, error=error.message)
                await backoff.wait()
                continue
            if isinstance(leased, Refused) and leased.reason == SessionLost.reason:
                self._session.lost(epoch)
                continue
            if isinstance(leased, Refused) and leased.reason not in NOT_OURS:
                raise InternalError(f"lock refused: {leased.reason}")
            return leased
