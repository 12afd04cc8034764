"""LifecycleService: what executors call. Each item of a batch is checked and answered by itself."""

from datetime import timedelta
from typing import Any, TypeAlias, assert_never

import grpc

from aijobs.errors import InvalidInput
from aijobs.v1 import lifecycle_service_pb2, lifecycle_service_pb2_grpc
from services.jobs.execution import Accepted, Cancelled, Failed, JobExecution, Outcome
from services.jobs.leasing import Extend, Extended, JobLeasing, Locked, LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.results import Succeeded
from services.jobs.rpc import translate
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.usage import Call, Settled
from services.jobs.usage import UsageLedger

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
LONGEST_CODE = 64
LONGEST_LATENCY = timedelta(days=1)
LONGEST_FEEDBACK = 4000
TOKEN_SOURCES = {
    lifecycle_service_pb2.TOKEN_SOURCE_MEASURED: "measured",
    lifecycle_service_pb2.TOKEN_SOURCE_ESTIMATED: "estimated",
    lifecycle_service_pb2.TOKEN_SOURCE_NONE: "none",
}


class LifecycleServicer(lifecycle_service_pb2_grpc.LifecycleServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(self, leasing: JobLeasing, execution: JobExecution, ledger: UsageLedger) -> None:
        self._leasing = leasing
        self._execution = execution
        self._ledger = ledger

    async def LockJobs(
        self, request: lifecycle_service_pb2.LockJobsRequest, context: Context
    ) -> lifecycle_service_pb2.LockJobsResponse:
        """Hand out leases."""
        del context
        executor_id = translate.identifier("executor_id", request.executor_id)
        batch = translate.Batch(request.items, _lock_request)
        results = batch.answers(
            await self._leasing.lock(executor_id, batch.good),
            accepted=lambda result: lifecycle_service_pb2.LockResult(locked=_locked(result)),
            refused=lambda error: lifecycle_service_pb2.LockResult(error=error),
        )
        return lifecycle_service_pb2.LockJobsResponse(results=results)

    async def ExtendLeases(
        self, request: lifecycle_service_pb2.ExtendLeasesRequest, context: Context
    ) -> lifecycle_service_pb2.ExtendLeasesResponse:
        """Renew leases."""
        del context
        translate.identifier("executor_id", request.executor_id)
        batch = translate.Batch(request.items, _extend)
        results = batch.answers(
            await self._leasing.extend(batch.good),
            accepted=lambda result: lifecycle_service_pb2.ExtendResult(extended=_extended(result)),
            refused=lambda error: lifecycle_service_pb2.ExtendResult(error=error),
        )
        return lifecycle_service_pb2.ExtendLeasesResponse(results=results)

    async def RecordUsage(
        self, request: lifecycle_service_pb2.RecordUsageRequest, context: Context
    ) -> lifecycle_service_pb2.RecordUsageResponse:
        """Store model calls."""
        del context
        batch = translate.Batch(request.calls, _call)
        results = batch.answers(
            await self._ledger.record(batch.good),
            accepted=lambda _: lifecycle_service_pb2.RecordUsageResult(),
            refused=lambda error: lifecycle_service_pb2.RecordUsageResult(error=error),
        )
        return lifecycle_service_pb2.RecordUsageResponse(results=results)

    async def SubmitOutcomes(
        self, request: lifecycle_service_pb2.SubmitOutcomesRequest, context: Context
    ) -> lifecycle_service_pb2.SubmitOutcomesResponse:
        """Store what became of runs."""
        del context
        translate.identifier("executor_id", request.executor_id)
        batch = translate.Batch(request.items, _outcome)
        results = batch.answers(
            await self._execution.submit(batch.good),
            accepted=lambda result: lifecycle_service_pb2.OutcomeResult(accepted=_accepted(result)),
            refused=lambda error: lifecycle_service_pb2.OutcomeResult(error=error),
        )
        return lifecycle_service_pb2.SubmitOutcomesResponse(results=results)


def _lease(message: lifecycle_service_pb2.Lease) -> Lease:
    return Lease(
        job_id=translate.identifier("lease.job_id", message.job_id),
        attempt=message.attempt,
        lease_token=translate.token("lease.lease_token", message.lease_token),
    )


def _lock_request(message: lifecycle_service_pb2.LockRequest) -> LockRequest:
    return LockRequest(
        job_id=translate.identifier("job_id", message.job_id),
        lease_token=translate.token("lease_token", message.lease_token),
    )


def _extend(message: lifecycle_service_pb2.ExtendLease) -> Extend:
    progress = message.progress if message.HasField("progress") else None
    if progress is not None and not 0 <= progress <= 100:  # noqa: PLR2004 - a percentage
        raise InvalidInput.field("progress", "must be from 0 to 100")
    return Extend(lease=_lease(message.lease), progress=progress)


def _outcome(message: lifecycle_service_pb2.Outcome) -> Outcome:
    lease = _lease(message.lease)
    match message.WhichOneof("outcome"):
        case "succeeded":
            report = message.succeeded
            return Outcome(
                lease=lease,
                report=Succeeded(
                    output_json=report.output_json,
                    output_hash=report.output_hash,
                    artifacts=[
                        ArtifactRow(
                            job_id=lease.job_id,
                            artifact_type=artifact.type,
                            artifact_id=artifact.id,
                            ordinal=artifact.ordinal,
                            content_json=artifact.content_json,
                        )
                        for artifact in report.projection.artifacts
                    ],
                ),
            )
        case "failed":
            failed = message.failed
            if failed.execution < 1:
                raise InvalidInput.field("failed.execution", "must be 1 or more")
            code = translate.identifier("failed.code", failed.code, most=LONGEST_CODE)
            return Outcome(
                lease=lease,
                report=Failed(
                    execution=failed.execution,
                    code=code,
                    internal=failed.internal_message.replace("\x00", ""),
                    feedback=failed.feedback.replace("\x00", "")[:LONGEST_FEEDBACK],
                ),
            )
        case "cancelled":
            return Outcome(lease=lease, report=Cancelled())
        case None:
            raise InvalidInput.field("outcome", "missing: say what became of the run")
        case never:
            assert_never(never)


def _call(message: lifecycle_service_pb2.ModelCall) -> Call:
    for field, number in (("attempt", message.attempt), ("call_no", message.call_no)):
        if number < 1:
            raise InvalidInput.field(field, "must be 1 or more")
    return Call(
        job_id=translate.identifier("job_id", message.job_id),
        attempt=message.attempt,
        call_no=message.call_no,
        provider=translate.identifier("provider", message.provider, most=64),
        model=translate.identifier("model", message.model),
        tier=translate.identifier("tier", message.tier, most=32),
        prompt_key=translate.optional_identifier("prompt_key", message.prompt_key),
        prompt_version=translate.optional_identifier("prompt_version", message.prompt_version, most=32),
        credential_mode=translate.identifier("credential_mode", message.credential_mode, most=32),
        settled=_settled(message.settlement) if message.HasField("settlement") else None,
    )


def _settled(message: lifecycle_service_pb2.CallSettlement) -> Settled:
    return Settled(
        input_tokens=translate.count("settlement.input_tokens", message.input_tokens),
        output_tokens=translate.count("settlement.output_tokens", message.output_tokens),
        token_source=TOKEN_SOURCES.get(message.token_source, "unknown"),
        latency=translate.span("settlement.latency", message.latency, most=LONGEST_LATENCY),
        error_code=translate.optional_identifier("settlement.error_code", message.error_code, most=LONGEST_CODE),
    )


def _locked(result: Locked) -> lifecycle_service_pb2.LockedJob:
    job = result.job
    return lifecycle_service_pb2.LockedJob(
        lease=lifecycle_service_pb2.Lease(job_id=job.job_id, attempt=job.attempt, lease_token=job.lease_token or ""),
        remaining=translate.duration(result.remaining),
        job=translate.row_only(job),
        snapshot_json=result.snapshot.content_json,
        snapshot_schema_version=result.snapshot.schema_version,
        earlier_errors=[
            lifecycle_service_pb2.ExecutionError(code=entry.reason, feedback=entry.feedback or "")
            for entry in result.earlier_errors
        ],
    )


def _extended(result: Extended) -> lifecycle_service_pb2.ExtendedLease:
    return lifecycle_service_pb2.ExtendedLease(
        remaining=translate.duration(result.remaining), cancel_requested=result.cancel_requested
    )


def _accepted(result: Accepted) -> lifecycle_service_pb2.OutcomeAccepted:
    return lifecycle_service_pb2.OutcomeAccepted(
        job=translate.row_only(result.job),
        run_again=result.backoff is not None,
        backoff=None if result.backoff is None else translate.duration(result.backoff),
    )
