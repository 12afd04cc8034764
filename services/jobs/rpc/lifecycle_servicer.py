"""LifecycleService: what executors call. Each item of a batch is checked and answered by itself."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, assert_never

import grpc
import structlog

from aijobs.errors import InvalidInput, Unavailable
from aijobs.v1 import lifecycle_service_pb2, lifecycle_service_pb2_grpc
from services.jobs.execution import Accepted, Cancelled, Failed, JobExecution, Outcome, Released
from services.jobs.leasing import Extend, Extended, Holder, JobLeasing, Locked, LockRequest
from services.jobs.lifecycle import Lease
from services.jobs.results import BusinessRow, FollowUp, Succeeded
from services.jobs.rpc import translate
from services.jobs.sessions import CancelRun, Command, Drain, ExecutorSessions, Session
from services.jobs.store.contents import ArtifactRow
from services.jobs.store.executors import Hello, QueueLoad
from services.jobs.store.usage import Call, Settled
from services.jobs.usage import UsageLedger

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()
LONGEST_CODE = 64
LONGEST_LATENCY = timedelta(days=1)
LONGEST_FEEDBACK = 4000
LONGEST_DELAY = timedelta(days=366)
LONGEST_RETRY_AFTER = timedelta(days=366)
LONGEST_IDLE = timedelta(days=3660)
LONGEST_VERSION = 64
MOST_QUEUES = 20
HELLO_WITHIN = timedelta(seconds=10)
MOST_TYPES = 1000
TOKEN_SOURCES = {
    lifecycle_service_pb2.TOKEN_SOURCE_MEASURED: "measured",
    lifecycle_service_pb2.TOKEN_SOURCE_ESTIMATED: "estimated",
    lifecycle_service_pb2.TOKEN_SOURCE_NONE: "none",
}


class LifecycleServicer(lifecycle_service_pb2_grpc.LifecycleServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(
        self, sessions: ExecutorSessions, leasing: JobLeasing, execution: JobExecution, ledger: UsageLedger
    ) -> None:
        self._sessions = sessions
        self._leasing = leasing
        self._execution = execution
        self._ledger = ledger

    async def OpenSession(
        self, request_iterator: AsyncIterator[lifecycle_service_pb2.OpenSessionRequest], context: Context
    ) -> AsyncIterator[lifecycle_service_pb2.OpenSessionResponse]:
        """Keep an executor's session: take its reports and send it commands until the stream ends."""
        del context
        try:
            async with asyncio.timeout(HELLO_WITHIN.total_seconds()):
                first = await anext(request_iterator, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidInput.field("hello", "missing: the first message says who is there")
        session = await self._sessions.open(_hello(first.hello))
        reports = asyncio.create_task(self._take_reports(session, request_iterator))
        left = False
        try:
            yield lifecycle_service_pb2.OpenSessionResponse(
                welcome=lifecycle_service_pb2.SessionWelcome(epoch=session.epoch)
            )
            async for command in _until_done(session.commands, reports):
                yield _command(command)
            if reports.result():
                await self._sessions.leave(session)
                left = True
        finally:
            reports.cancel()
            reports.add_done_callback(_retrieve)
            if not left:
                self._sessions.close(session)

    async def _take_reports(
        self, session: Session, requests: AsyncIterator[lifecycle_service_pb2.OpenSessionRequest]
    ) -> bool:
        """Take reports until the stream ends; True if its last word was a goodbye.

        The end alone says nothing: that of a connection that broke looks the same.
        """
        async for request in requests:
            if request.WhichOneof("message") == "goodbye":
                return True
            if request.WhichOneof("message") != "status":
                raise InvalidInput.field("status", "missing: after the hello come reports")
            try:
                await self._sessions.report(session, _loads("status.queues", request.status.queues))
            except Unavailable:
                # The next one will do.
                log.warning("executor's report not stored: the database cannot be reached")
        return False

    async def LockJobs(
        self, request: lifecycle_service_pb2.LockJobsRequest, context: Context
    ) -> lifecycle_service_pb2.LockJobsResponse:
        """Hand out leases."""
        del context
        holder = Holder(
            executor_id=translate.identifier("executor_id", request.executor_id), session_epoch=request.session_epoch
        )
        batch = translate.Batch(request.items, _lock_request)
        results = batch.answers(
            await self._leasing.lock(holder, batch.good),
            accepted=lambda result: lifecycle_service_pb2.LockResult(locked=_locked(result)),
            refused=lambda error: lifecycle_service_pb2.LockResult(error=error),
        )
        return lifecycle_service_pb2.LockJobsResponse(results=results)

    async def ExtendLeases(
        self, request: lifecycle_service_pb2.ExtendLeasesRequest, context: Context
    ) -> lifecycle_service_pb2.ExtendLeasesResponse:
        """Renew leases."""
        del context
        executor_id = translate.identifier("executor_id", request.executor_id)
        batch = translate.Batch(request.items, _extend)
        results = batch.answers(
            await self._leasing.extend(executor_id, batch.good),
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
        executor_id = translate.identifier("executor_id", request.executor_id)
        batch = translate.Batch(request.items, _outcome)
        results = batch.answers(
            await self._execution.submit(executor_id, batch.good),
            accepted=lambda result: lifecycle_service_pb2.OutcomeResult(accepted=_accepted(result)),
            refused=lambda error: lifecycle_service_pb2.OutcomeResult(error=error),
        )
        return lifecycle_service_pb2.SubmitOutcomesResponse(results=results)


async def _until_done(commands: asyncio.Queue[Command], reports: asyncio.Task[bool]) -> AsyncIterator[Command]:
    """Yield commands until the executor has ended its side of the stream.

    Raises:
        InvalidInput: what it sent last was no report.

    """
    while True:
        command = asyncio.ensure_future(commands.get())
        try:
            await asyncio.wait({command, reports}, return_when=asyncio.FIRST_COMPLETED)
            if not command.done():
                reports.result()
                return
            yield command.result()
        finally:
            command.cancel()


def _retrieve(task: asyncio.Task[bool]) -> None:
    if not task.cancelled():
        task.exception()


def _command(command: Command) -> lifecycle_service_pb2.OpenSessionResponse:
    match command:
        case CancelRun():
            return lifecycle_service_pb2.OpenSessionResponse(
                cancel=lifecycle_service_pb2.CancelRun(job_id=command.job_id, attempt=command.attempt)
            )
        case Drain():
            return lifecycle_service_pb2.OpenSessionResponse(drain=lifecycle_service_pb2.DrainCommand())


def _hello(message: lifecycle_service_pb2.SessionHello) -> Hello:
    if len(message.job_types) > MOST_TYPES:
        raise InvalidInput.field("hello.job_types", f"{len(message.job_types)} types; at most {MOST_TYPES}")
    if message.hello_no < 1:
        raise InvalidInput.field("hello.hello_no", "must be 1 or more")
    return Hello(
        hello_no=message.hello_no,
        executor_id=translate.identifier("hello.executor_id", message.executor_id),
        version=translate.optional_identifier("hello.version", message.version, most=LONGEST_VERSION),
        job_types=[translate.identifier("hello.job_types", name) for name in message.job_types],
        queues=_loads("hello.queues", message.queues),
    )


def _loads(field: str, messages: Sequence[lifecycle_service_pb2.QueueLoad]) -> Sequence[QueueLoad]:
    if len(messages) > MOST_QUEUES:
        raise InvalidInput.field(field, f"{len(messages)} queues; at most {MOST_QUEUES}")
    return [
        QueueLoad(
            queue=translate.identifier(f"{field}.queue", message.queue, most=64),
            slots=translate.count(f"{field}.slots", message.slots),
            free_slots=translate.count(f"{field}.free_slots", message.free_slots),
            idle=translate.span(f"{field}.idle", message.idle, most=LONGEST_IDLE),
        )
        for message in messages
    ]


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
                    follow_ups=[
                        FollowUp(job_type=follow_up.job_type, input_json=follow_up.input_json)
                        for follow_up in report.projection.follow_ups
                    ],
                    rows=[
                        BusinessRow(writer=row.writer, content_json=row.content_json) for row in report.projection.rows
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
                    retry_after=translate.span("failed.retry_after", failed.retry_after, most=LONGEST_RETRY_AFTER),
                ),
            )
        case "cancelled":
            return Outcome(lease=lease, report=Cancelled())
        case "released":
            released = message.released
            return Outcome(
                lease=lease,
                report=Released(
                    reason=translate.reason("released.reason", released.reason),
                    delay=translate.span("released.delay", released.delay, most=LONGEST_DELAY),
                ),
            )
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
        abort_after=translate.duration(result.abort_after),
        run_remaining=None if result.job.run_remaining is None else translate.duration(result.job.run_remaining),
    )


def _extended(result: Extended) -> lifecycle_service_pb2.ExtendedLease:
    return lifecycle_service_pb2.ExtendedLease(
        remaining=translate.duration(result.remaining),
        cancel_requested=result.cancel_requested,
        abort_after=translate.duration(result.abort_after),
    )


def _accepted(result: Accepted) -> lifecycle_service_pb2.OutcomeAccepted:
    return lifecycle_service_pb2.OutcomeAccepted(
        job=translate.row_only(result.job),
        run_again=result.backoff is not None,
        backoff=None if result.backoff is None else translate.duration(result.backoff),
    )
