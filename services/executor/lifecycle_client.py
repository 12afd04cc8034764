"""The jobs service's LifecycleService as the executor calls it.

Protobuf messages end here; those of a session end in `session.py`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import grpc
import structlog

from aijobs.backoff import Backoff
from aijobs.errors import AijobsError, InternalError
from aijobs.job_type import EarlierError
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import job_pb2, lifecycle_service_pb2, lifecycle_service_pb2_grpc
from services.executor.gateway.ledger import CallOpened, CallSettled
from services.executor.gateway.provider import TokenSource
from services.executor.leases import Beat, Lease, LeasedJob
from services.executor.outcomes import Cancelled, Failed, Released, Report, Succeeded

CALL_TIMEOUT = timedelta(seconds=10)
SessionCall: TypeAlias = grpc.aio.StreamStreamCall[
    lifecycle_service_pb2.OpenSessionRequest, lifecycle_service_pb2.OpenSessionResponse
]
TOKEN_SOURCES = {
    TokenSource.MEASURED: lifecycle_service_pb2.TOKEN_SOURCE_MEASURED,
    TokenSource.ESTIMATED: lifecycle_service_pb2.TOKEN_SOURCE_ESTIMATED,
    TokenSource.NONE: lifecycle_service_pb2.TOKEN_SOURCE_NONE,
}
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The jobs service refused one item; the reason is one of `aijobs.errors`."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A lease goes on, for `abort_after` from the moment the request was sent."""

    cancel_requested: bool
    abort_after: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A report was stored. `backoff` is set when the run may try again."""

    state: str
    backoff: timedelta | None


class LifecycleClient:
    """Calls the LifecycleService. Every call may be repeated with the same arguments."""

    def __init__(self, channel: grpc.aio.Channel, executor_id: str) -> None:
        self._stub: lifecycle_service_pb2_grpc.LifecycleServiceAsyncStub = (
            lifecycle_service_pb2_grpc.LifecycleServiceStub(channel)
        )
        self._executor_id = executor_id

    def open_session(self, messages: AsyncIterator[lifecycle_service_pb2.OpenSessionRequest]) -> SessionCall:
        """Open a session's stream, which takes its messages from the iterator."""
        return self._stub.OpenSession(messages)

    async def lock(self, job_id: str, lease_token: str, session_epoch: int) -> LeasedJob | Refused:
        """Take a job's lease.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        item = lifecycle_service_pb2.LockRequest(job_id=job_id, lease_token=lease_token)
        request = lifecycle_service_pb2.LockJobsRequest(
            executor_id=self._executor_id, items=[item], session_epoch=session_epoch
        )
        sent_at = asyncio.get_running_loop().time()
        try:
            response = await self._stub.LockJobs(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        (result,) = response.results
        return _refused(result.error) if result.HasField("error") else _leased(result.locked, sent_at)

    async def extend(self, beats: Sequence[Beat], progress: Sequence[int | None]) -> list[Renewed | Refused]:
        """Renew leases.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        request = lifecycle_service_pb2.ExtendLeasesRequest(
            executor_id=self._executor_id,
            items=[
                lifecycle_service_pb2.ExtendLease(lease=_lease(beat.lease), progress=percent)
                for beat, percent in zip(beats, progress, strict=True)
            ],
        )
        try:
            response = await self._stub.ExtendLeases(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [
            _refused(result.error)
            if result.HasField("error")
            else Renewed(
                cancel_requested=result.extended.cancel_requested,
                abort_after=result.extended.abort_after.ToTimedelta(),
            )
            for result in response.results
        ]

    async def submit(self, lease: Lease, outcome: Report) -> Accepted | Refused:
        """Report what became of a run, trying as long as the jobs service is merely away.

        Nothing is lost by trying long: the lease is renewed meanwhile, and a report with a lost lease is refused.

        Raises:
            AijobsError: the report as such is not taken: too large, not permitted, a fault of the service.

        """
        backoff = Backoff()
        while True:
            try:
                return await self._submit(lease, outcome)
            except AijobsError as error:
                if not error.transient:
                    raise
                log.warning("outcome not stored yet", job_id=lease.job_id, error=error.message)
            await backoff.wait()

    async def _submit(self, lease: Lease, outcome: Report) -> Accepted | Refused:
        request = lifecycle_service_pb2.SubmitOutcomesRequest(
            executor_id=self._executor_id, items=[_outcome(lease, outcome)]
        )
        try:
            response = await self._stub.SubmitOutcomes(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        (result,) = response.results
        if result.HasField("error"):
            return _refused(result.error)
        accepted = result.accepted
        return Accepted(
            state=job_pb2.JobState.Name(accepted.job.state),
            backoff=accepted.backoff.ToTimedelta() if accepted.run_again else None,
        )

    async def record(self, lease: Lease, call: CallOpened | CallSettled) -> None:
        """Store a model call in the ledger.

        Raises:
            AijobsError: the service is unreachable or refuses us.

        """
        request = lifecycle_service_pb2.RecordUsageRequest(calls=[_call(lease, call)])
        try:
            response = await self._stub.RecordUsage(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        (result,) = response.results
        if result.HasField("error"):
            raise InternalError(f"usage refused: {result.error.reason}: {result.error.message}")


def _refused(error: lifecycle_service_pb2.ItemError) -> Refused:
    return Refused(reason=error.reason, message=error.message)


def _lease(lease: Lease) -> lifecycle_service_pb2.Lease:
    return lifecycle_service_pb2.Lease(job_id=lease.job_id, attempt=lease.attempt, lease_token=lease.lease_token)


def _leased(locked: lifecycle_service_pb2.LockedJob, sent_at: float) -> LeasedJob:
    return LeasedJob(
        lease=Lease(job_id=locked.lease.job_id, attempt=locked.lease.attempt, lease_token=locked.lease.lease_token),
        job_type=locked.job.job_type,
        user_id=locked.job.user_id,
        root_job_id=locked.job.root_job_id,
        takeovers=locked.job.takeover_count,
        depth=locked.job.depth,
        snapshot_json=locked.snapshot_json,
        earlier_errors=[EarlierError(code=error.code, feedback=error.feedback) for error in locked.earlier_errors],
        run_until=sent_at + locked.run_remaining.ToTimedelta().total_seconds()
        if locked.HasField("run_remaining")
        else math.inf,
        abort_at=sent_at + locked.abort_after.ToTimedelta().total_seconds(),
    )


def _outcome(lease: Lease, outcome: Report) -> lifecycle_service_pb2.Outcome:
    message = lifecycle_service_pb2.Outcome(lease=_lease(lease))
    match outcome:
        case Succeeded():
            message.succeeded.output_json = outcome.output_json
            message.succeeded.output_hash = outcome.output_hash
            message.succeeded.projection.artifacts.extend(
                job_pb2.Artifact(
                    type=artifact.type,
                    id=artifact.artifact_id,
                    ordinal=artifact.ordinal,
                    content_json=artifact.content_json,
                )
                for artifact in outcome.artifacts
            )
            message.succeeded.projection.follow_ups.extend(
                lifecycle_service_pb2.FollowUpJob(job_type=follow_up.job_type, input_json=follow_up.input_json)
                for follow_up in outcome.follow_ups
            )
            message.succeeded.projection.rows.extend(
                lifecycle_service_pb2.BusinessRow(writer=row.writer, content_json=row.content_json)
                for row in outcome.rows
            )
        case Failed():
            message.failed.execution = outcome.execution
            message.failed.code = outcome.code
            message.failed.internal_message = outcome.internal
            message.failed.feedback = outcome.feedback
            message.failed.retry_after.FromTimedelta(outcome.retry_after)
        case Cancelled():
            message.cancelled.SetInParent()
        case Released():
            message.released.reason = outcome.reason
            message.released.delay.FromTimedelta(outcome.delay)
    return message


def _call(lease: Lease, call: CallOpened | CallSettled) -> lifecycle_service_pb2.ModelCall:
    opened = call.opened if isinstance(call, CallSettled) else call
    message = lifecycle_service_pb2.ModelCall(
        job_id=lease.job_id,
        attempt=lease.attempt,
        call_no=opened.call_no,
        provider=opened.provider,
        model=opened.model,
        tier=opened.tier,
        prompt_key=opened.prompt_key,
        prompt_version=opened.prompt_version,
        credential_mode=opened.credential_mode,
    )
    if isinstance(call, CallSettled):
        message.settlement.input_tokens = call.usage.input_tokens
        message.settlement.output_tokens = call.usage.output_tokens
        message.settlement.token_source = TOKEN_SOURCES[call.usage.token_source]
        message.settlement.latency.FromTimedelta(call.latency)
        message.settlement.error_code = call.error_code
    return message
