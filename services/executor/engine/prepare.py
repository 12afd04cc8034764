"""PREPARE: take the lease and look up what the job is (EX-1, LC-4)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

import structlog

from aijobs.backoff import Backoff
from aijobs.definition import JobDefinition
from aijobs.errors import AijobsError
from aijobs.job_type import Executor, Projector
from services.executor.leases import LeasedJob
from services.executor.lifecycle_client import LifecycleClient, Refused

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A job type with its code loaded."""

    definition: JobDefinition
    execute: Executor
    project: Projector | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A leased job and its handler."""

    leased: LeasedJob
    handler: Handler


class Prepare:
    """The stage. The lease token is made here, once, so that a repeated lock gets the same lease."""

    def __init__(
        self,
        client: LifecycleClient,
        handlers: Mapping[str, Handler],
        make_token: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._client = client
        self._handlers = handlers
        self._make_token = make_token

    def knows(self, job_type: str) -> bool:
        """Tell whether this executor can run jobs of a type."""
        return job_type in self._handlers

    async def __call__(self, job_id: str) -> Prepared | Refused:
        """Lock the job, trying until the jobs service answers."""
        leased = await self._lock(job_id, self._make_token())
        if isinstance(leased, Refused):
            return leased
        return Prepared(leased=leased, handler=self._handlers[leased.job_type])

    async def _lock(self, job_id: str, token: str) -> LeasedJob | Refused:
        backoff = Backoff()
        while True:
            try:
                return await self._client.lock(job_id, token)
            except AijobsError as error:
                log.warning("job not locked yet", job_id=job_id, error=error.message)
            await backoff.wait()
