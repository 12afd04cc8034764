"""JobAdminService: what operators call (what is about outbox events: `outbox_admin_servicer.py`)."""

import json
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import grpc

from aijobs.definition import JobDefinition
from aijobs.errors import InvalidInput
from aijobs.registry import Registry
from aijobs.rpc.auth import current_caller
from aijobs.v1 import job_admin_service_pb2
from services.jobs.consistency import Consistency
from services.jobs.event_queries import EventQueries
from services.jobs.findings import Finding, FindingKind
from services.jobs.operating import ExecutorStatus, Operating
from services.jobs.outbox_admin import OutboxAdmin
from services.jobs.retrying import JobRetrying, Retry
from services.jobs.rpc import translate
from services.jobs.rpc.outbox_admin_servicer import OutboxAdminServicer
from services.jobs.store.platform import Availability
from services.jobs.store.queues import QueueRow

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
#: An executor reports every 5 s. One that is silent for so long is not there, although nobody saw its session break.
SILENT_AFTER = timedelta(seconds=15)
#: What a history entry has room for, beside the name of the job that is retried.
LONGEST_RETRY_REASON = 200
FINDING_KINDS = {
    FindingKind.EVENT_MISSING: job_admin_service_pb2.FINDING_KIND_EVENT_MISSING,
    FindingKind.EVENT_DEAD: job_admin_service_pb2.FINDING_KIND_EVENT_DEAD,
    FindingKind.MESSAGE_LOST: job_admin_service_pb2.FINDING_KIND_MESSAGE_LOST,
    FindingKind.LEASE_OVERDUE: job_admin_service_pb2.FINDING_KIND_LEASE_OVERDUE,
    FindingKind.NO_EXECUTOR: job_admin_service_pb2.FINDING_KIND_NO_EXECUTOR,
    FindingKind.NO_DISPATCHER: job_admin_service_pb2.FINDING_KIND_NO_DISPATCHER,
    FindingKind.EVENTS_PARKED: job_admin_service_pb2.FINDING_KIND_EVENTS_PARKED,
    FindingKind.END_EVENT_MISSING: job_admin_service_pb2.FINDING_KIND_END_EVENT_MISSING,
}


class JobAdminServicer(OutboxAdminServicer):
    """Translates between the wire and the use cases."""

    def __init__(
        self,
        *,
        registry: Registry,
        retrying: JobRetrying,
        operating: Operating,
        event_queries: EventQueries,
        outbox_admin: OutboxAdmin,
        consistency: Consistency,
    ) -> None:
        super().__init__(event_queries, outbox_admin)
        self._registry = registry
        self._retrying = retrying
        self._operating = operating
        self._consistency = consistency

    async def ListJobTypes(
        self, request: job_admin_service_pb2.ListJobTypesRequest, context: Context
    ) -> job_admin_service_pb2.ListJobTypesResponse:
        """Return every definition (RG-4)."""
        del request, context
        return job_admin_service_pb2.ListJobTypesResponse(
            job_types=[_job_type(definition) for definition in self._registry.values()]
        )

    async def RetryJob(
        self, request: job_admin_service_pb2.RetryJobRequest, context: Context
    ) -> job_admin_service_pb2.RetryJobResponse:
        """Make a new job with the input of an ended one (LC-10)."""
        del context
        job = await self._retrying.retry(
            current_caller().subject,
            Retry(
                request_id=translate.identifier("request_id", request.request_id or str(uuid4())),
                job_id=translate.identifier("job_id", request.job_id),
                reason=translate.reason("reason", request.reason, most=LONGEST_RETRY_REASON),
            ),
        )
        return job_admin_service_pb2.RetryJobResponse(job=translate.row_only(job))

    async def ListExecutors(
        self, request: job_admin_service_pb2.ListExecutorsRequest, context: Context
    ) -> job_admin_service_pb2.ListExecutorsResponse:
        """Return the executors that were seen lately."""
        del request, context
        found = await self._operating.executors()
        return job_admin_service_pb2.ListExecutorsResponse(executors=[_executor(status) for status in found])

    async def DrainExecutor(
        self, request: job_admin_service_pb2.DrainExecutorRequest, context: Context
    ) -> job_admin_service_pb2.DrainExecutorResponse:
        """Have an executor take no more jobs."""
        del context
        executor_id = translate.identifier("executor_id", request.executor_id)
        status = await self._operating.drain(current_caller().subject, executor_id)
        return job_admin_service_pb2.DrainExecutorResponse(executor=_executor(status))

    async def ListQueues(
        self, request: job_admin_service_pb2.ListQueuesRequest, context: Context
    ) -> job_admin_service_pb2.ListQueuesResponse:
        """Return every queue."""
        del request, context
        return job_admin_service_pb2.ListQueuesResponse(queues=map(_queue, await self._operating.queues()))

    async def PauseQueue(
        self, request: job_admin_service_pb2.PauseQueueRequest, context: Context
    ) -> job_admin_service_pb2.PauseQueueResponse:
        """Stop the start of a queue's jobs (QU-2)."""
        del context
        reason = translate.reason("reason", request.reason)
        paused = await self._operating.pause(current_caller().subject, request.queue, reason)
        return job_admin_service_pb2.PauseQueueResponse(queue=_queue(paused))

    async def ResumeQueue(
        self, request: job_admin_service_pb2.ResumeQueueRequest, context: Context
    ) -> job_admin_service_pb2.ResumeQueueResponse:
        """End a pause (QU-2)."""
        del context
        resumed = await self._operating.resume(current_caller().subject, request.queue)
        return job_admin_service_pb2.ResumeQueueResponse(queue=_queue(resumed))

    async def GetPlatformAvailability(
        self, request: job_admin_service_pb2.GetPlatformAvailabilityRequest, context: Context
    ) -> job_admin_service_pb2.GetPlatformAvailabilityResponse:
        """Tell whether jobs can be created."""
        del request, context
        availability = _availability(await self._operating.availability())
        return job_admin_service_pb2.GetPlatformAvailabilityResponse(availability=availability)

    async def SetPlatformAvailability(
        self, request: job_admin_service_pb2.SetPlatformAvailabilityRequest, context: Context
    ) -> job_admin_service_pb2.SetPlatformAvailabilityResponse:
        """Switch the creation of jobs on or off (CR-5)."""
        del context
        if not request.HasField("available"):
            raise InvalidInput.field("available", "missing: say true or false")
        switch = await self._operating.set_availability(
            current_caller().subject,
            available=request.available,
            reason=translate.reason("reason", request.reason),
        )
        return job_admin_service_pb2.SetPlatformAvailabilityResponse(availability=_availability(switch))

    async def CheckConsistency(
        self, request: job_admin_service_pb2.CheckConsistencyRequest, context: Context
    ) -> job_admin_service_pb2.CheckConsistencyResponse:
        """Look for what is not as it must be (LC-13)."""
        del context
        report = await self._consistency.check(current_caller().subject, repair=request.repair)
        return job_admin_service_pb2.CheckConsistencyResponse(
            findings=map(_finding, report.findings),
            counts=[
                job_admin_service_pb2.FindingCount(
                    kind=FINDING_KINDS[kind], found=count, repaired=report.repaired[kind]
                )
                for kind, count in sorted(report.found.items())
            ],
        )


def _finding(finding: Finding) -> job_admin_service_pb2.Finding:
    return job_admin_service_pb2.Finding(
        kind=FINDING_KINDS[finding.kind],
        job_id=finding.job_id,
        queue=finding.queue,
        problem=finding.problem,
        advice=finding.advice,
        repaired=finding.repaired,
    )


def _executor(status: ExecutorStatus) -> job_admin_service_pb2.Executor:
    row = status.executor
    if row.lost_at is not None:
        state = job_admin_service_pb2.EXECUTOR_STATE_LOST
    elif row.disconnected_at is not None or row.read_at - row.seen_at > SILENT_AFTER:
        state = job_admin_service_pb2.EXECUTOR_STATE_DISCONNECTED
    else:
        state = job_admin_service_pb2.EXECUTOR_STATE_CONNECTED
    return job_admin_service_pb2.Executor(
        executor_id=row.executor_id,
        state=state,
        version=row.version,
        queues=[
            job_admin_service_pb2.ExecutorQueue(
                queue=load.queue,
                slots=load.slots,
                free_slots=load.free_slots,
                idle_since=translate.timestamp(row.reported_at - load.idle) if load.free_slots else None,
            )
            for load in row.queues
        ],
        job_types=row.job_types,
        running=status.running,
        session_epoch=row.session_epoch,
        first_seen_time=translate.timestamp(row.first_seen_at),
        last_seen_time=translate.timestamp(row.seen_at),
        drain_time=translate.timestamp(row.drain_requested_at),
    )


def _queue(row: QueueRow) -> job_admin_service_pb2.QueueInfo:
    return job_admin_service_pb2.QueueInfo(
        queue=row.queue,
        paused=row.paused_at is not None,
        pause_time=translate.timestamp(row.paused_at),
        paused_by=row.paused_by,
        reason=row.reason,
    )


def _availability(switch: Availability) -> job_admin_service_pb2.PlatformAvailability:
    return job_admin_service_pb2.PlatformAvailability(
        available=switch.available,
        reason=switch.reason,
        changed_by=switch.changed_by,
        change_time=translate.timestamp(switch.changed_at),
    )


def _job_type(definition: JobDefinition) -> job_admin_service_pb2.JobType:
    return job_admin_service_pb2.JobType(
        job_type=definition.job_type,
        label=definition.metadata.label,
        description=definition.metadata.description,
        domain=definition.metadata.domain,
        version=definition.metadata.version,
        queue=definition.routing.queue,
        default_priority=definition.routing.default_priority,
        timeout_ms=definition.execution.timeout // timedelta(milliseconds=1),
        max_retries=definition.max_retries,
        cancellable=definition.execution.cancellable,
        input_schema_version=definition.input.version,
        input_schema_json=json.dumps(definition.input.model.model_json_schema()),
        output_schema_version=definition.output.version,
        output_schema_json=json.dumps(definition.output.model.model_json_schema()),
    )
