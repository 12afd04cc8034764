"""JobService: what backends and users call."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import uuid4

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from aijobs.errors import AijobsError, InvalidInput
from aijobs.rpc.auth import current_caller
from aijobs.tracing import TRACEPARENT, valid_traceparent
from aijobs.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc
from services.jobs.admission import LARGE_INPUT, NewJob
from services.jobs.cancellation import Cancel, CancelOutcome, JobCancellation
from services.jobs.creation import JobCreation
from services.jobs.queries import JobFilter, JobQueries, Viewer
from services.jobs.rpc import translate
from services.jobs.watching import JobWatching

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
OUTCOMES = {
    CancelOutcome.CANCELLED: job_service_pb2.CANCEL_OUTCOME_CANCELLED,
    CancelOutcome.REQUESTED: job_service_pb2.CANCEL_OUTCOME_REQUESTED,
}


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(
        self, creation: JobCreation, queries: JobQueries, cancellation: JobCancellation, watching: JobWatching
    ) -> None:
        self._creation = creation
        self._queries = queries
        self._cancellation = cancellation
        self._watching = watching

    async def CreateJob(
        self, request: job_service_pb2.CreateJobRequest, context: Context
    ) -> job_service_pb2.CreateJobResponse:
        """Create one job."""
        sent = [str(value) for name, value in context.invocation_metadata() or () if name == TRACEPARENT]
        new = replace(await _new_job(request), trace_context=valid_traceparent(sent))
        if request.validate_only:
            await self._creation.check(new)
            return job_service_pb2.CreateJobResponse()
        (created,) = await self._creation.create(current_caller().subject, [new])
        if isinstance(created, AijobsError):
            raise created
        return job_service_pb2.CreateJobResponse(
            job=translate.row_only(created.job),
            deduplicated=created.deduplicated,
            request_differs=created.request_differs,
        )

    async def GetJob(self, request: job_service_pb2.GetJobRequest, context: Context) -> job_service_pb2.GetJobResponse:
        """Return one job."""
        del context
        if request.view not in job_pb2.JobView.values():
            raise InvalidInput.field("view", f"no view with number {request.view}")
        detail = await self._queries.get(
            _viewer(request.user_id),
            translate.identifier("job_id", request.job_id),
            full=request.view == job_pb2.JOB_VIEW_FULL,
        )
        return job_service_pb2.GetJobResponse(job=translate.job(detail))

    async def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: Context
    ) -> job_service_pb2.ListJobsResponse:
        """Return a page of jobs."""
        del context
        unknown = [number for number in request.states if number not in translate.STATES_BACK]
        if unknown:
            raise InvalidInput.field("states", f"no state with number {unknown[0]}")
        caller = current_caller()
        page = await self._queries.page(
            Viewer(caller=caller.subject, user_id=None if caller.may_act_for_anyone else caller.subject),
            JobFilter(
                user_id=translate.optional_identifier("user_id", request.user_id),
                job_type=translate.optional_identifier("job_type", request.job_type),
                states=sorted({translate.STATES_BACK[number] for number in request.states}),
                queue=translate.optional_identifier("queue", request.queue),
            ),
            size=request.page_size,
            token=request.page_token,
        )
        return job_service_pb2.ListJobsResponse(
            jobs=[translate.job(detail) for detail in page.jobs], next_page_token=page.next_page_token
        )

    async def CancelJob(
        self, request: job_service_pb2.CancelJobRequest, context: Context
    ) -> job_service_pb2.CancelJobResponse:
        """Cancel one job."""
        del context
        answer = await self._cancellation.cancel(
            _viewer(request.user_id),
            Cancel(
                request_id=translate.identifier("request_id", request.request_id or str(uuid4())),
                job_id=translate.identifier("job_id", request.job_id),
                reason=translate.reason("reason", request.reason),
            ),
        )
        return job_service_pb2.CancelJobResponse(outcome=OUTCOMES[answer.outcome], job=translate.row_only(answer.job))

    async def WatchJob(
        self, request: job_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
        """Stream one job's changes."""
        del context
        after = request.after_sequence if request.HasField("after_sequence") else None
        if after is not None and after < 0:
            raise InvalidInput.field("after_sequence", "must not be negative")
        updates = self._watching.watch(
            _viewer(request.user_id),
            translate.identifier("job_id", request.job_id),
            after_sequence=after,
            include_progress=request.include_progress,
        )
        async for update in updates:
            message = job_service_pb2.WatchJobResponse()
            if update.detail is None:
                now = Timestamp()
                now.GetCurrentTime()
                message.keep_alive_time.CopyFrom(now)
            else:
                message.job.CopyFrom(translate.job(update.detail))
            if update.transition is not None:
                message.transition.CopyFrom(translate.transition(update.transition))
            yield message


def _viewer(user_id: str) -> Viewer:
    """Say whose jobs exist for the caller: everybody's, those of the user it speaks for, or only its own."""
    caller = current_caller()
    if caller.may_act_for_anyone:
        return Viewer(caller=caller.subject, user_id=user_id or None)
    return Viewer(caller=caller.subject, user_id=caller.subject)


async def _new_job(request: job_service_pb2.CreateJobRequest) -> NewJob:
    overrides = request.overrides
    size = translate.payload_size(request)
    # A large input is read beside the event loop, as it is checked later.
    large = size > LARGE_INPUT
    value = await asyncio.to_thread(translate.payload, request) if large else translate.payload(request)
    return NewJob(
        # Callers that want repeats to be safe send their own.
        request_id=request.request_id or str(uuid4()),
        user_id=request.user_id,
        job_type=request.job_type,
        target_type=request.target.type,
        target_id=request.target.id,
        input=value,
        input_size=size,
        idempotency_key=request.idempotency_key or None,
        strict_idempotency=request.strict_idempotency,
        labels=dict(request.labels),
        priority=overrides.priority if overrides.HasField("priority") else None,
        credential_mode=overrides.credential_mode,
        credential_id=overrides.credential_id,
        prompt_version=overrides.prompt_version,
        output_schema_version=overrides.output_schema_version,
        run_at=translate.moment("run_at", request.run_at) if request.HasField("run_at") else None,
    )
