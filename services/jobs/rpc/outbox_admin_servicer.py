"""The part of JobAdminService that is about outbox events."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from aijobs.errors import AijobsError, InvalidInput
from aijobs.rpc.auth import current_caller
from aijobs.v1 import job_admin_service_pb2, job_admin_service_pb2_grpc, lifecycle_service_pb2
from services.jobs.event_queries import EventQueries
from services.jobs.outbox_admin import EventResult, OutboxAdmin, Outcome
from services.jobs.rpc import translate
from services.jobs.store.outbox import EventStatus
from services.jobs.store.outbox_admin import EventDetail, EventFilter

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

STATUSES = {
    EventStatus.SCHEDULED: job_admin_service_pb2.OUTBOX_EVENT_STATUS_SCHEDULED,
    EventStatus.PENDING: job_admin_service_pb2.OUTBOX_EVENT_STATUS_PENDING,
    EventStatus.PROCESSING: job_admin_service_pb2.OUTBOX_EVENT_STATUS_PROCESSING,
    EventStatus.PUBLISHED: job_admin_service_pb2.OUTBOX_EVENT_STATUS_PUBLISHED,
    EventStatus.DEAD: job_admin_service_pb2.OUTBOX_EVENT_STATUS_DEAD,
    EventStatus.DISCARDED: job_admin_service_pb2.OUTBOX_EVENT_STATUS_DISCARDED,
}
STATUSES_BACK = {number: status for status, number in STATUSES.items()}
OUTCOMES = {
    Outcome.REQUEUED: job_admin_service_pb2.OUTBOX_EVENT_OUTCOME_REQUEUED,
    Outcome.DISCARDED: job_admin_service_pb2.OUTBOX_EVENT_OUTCOME_DISCARDED,
}


class OutboxAdminServicer(job_admin_service_pb2_grpc.JobAdminServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(self, event_queries: EventQueries, outbox_admin: OutboxAdmin) -> None:
        self._event_queries = event_queries
        self._outbox_admin = outbox_admin

    async def ListOutboxEvents(
        self, request: job_admin_service_pb2.ListOutboxEventsRequest, context: Context
    ) -> job_admin_service_pb2.ListOutboxEventsResponse:
        """Return a page of events (OB-3)."""
        del context
        unknown = [number for number in request.statuses if number not in STATUSES_BACK]
        if unknown:
            raise InvalidInput.field("statuses", f"no status with number {unknown[0]}")
        page = await self._event_queries.page(
            _filter(request),
            statuses=sorted({STATUSES_BACK[number] for number in request.statuses}),
            size=request.page_size,
            token=request.page_token,
        )
        return job_admin_service_pb2.ListOutboxEventsResponse(
            events=map(_event, page.events), next_page_token=page.next_page_token
        )

    async def CountOutboxEvents(
        self, request: job_admin_service_pb2.CountOutboxEventsRequest, context: Context
    ) -> job_admin_service_pb2.CountOutboxEventsResponse:
        """Count the events."""
        del request, context
        counts = await self._event_queries.counts()
        return job_admin_service_pb2.CountOutboxEventsResponse(
            counts=[
                job_admin_service_pb2.OutboxEventCount(status=STATUSES[status], count=count)
                for status, count in counts.by_status.items()
            ],
            parked=[
                job_admin_service_pb2.OutboxEventCount(
                    status=job_admin_service_pb2.OUTBOX_EVENT_STATUS_PENDING, event_type=event_type, count=count
                )
                for event_type, count in sorted(counts.parked.items())
            ],
        )

    async def RequeueOutboxEvents(
        self, request: job_admin_service_pb2.RequeueOutboxEventsRequest, context: Context
    ) -> job_admin_service_pb2.RequeueOutboxEventsResponse:
        """Have dead events published after all (OB-3)."""
        del context
        caller = current_caller().subject
        if request.HasField("filter") == bool(request.event_ids):
            raise InvalidInput.field("event_ids", "say either which events, or a filter")
        if request.HasField("filter"):
            results, more = await self._outbox_admin.requeue_dead(
                caller, _filter(request.filter), dry_run=request.dry_run
            )
            return job_admin_service_pb2.RequeueOutboxEventsResponse(results=map(_result, results), more=more)
        batch = translate.Batch(request.event_ids, _event_id)
        requeued = await self._outbox_admin.requeue(caller, batch.good, dry_run=request.dry_run)
        return job_admin_service_pb2.RequeueOutboxEventsResponse(results=_in_order(request.event_ids, batch, requeued))

    async def DiscardOutboxEvents(
        self, request: job_admin_service_pb2.DiscardOutboxEventsRequest, context: Context
    ) -> job_admin_service_pb2.DiscardOutboxEventsResponse:
        """Give up events that are not published yet (OB-5)."""
        del context
        if not request.event_ids:
            raise InvalidInput.field("event_ids", "missing: say which events")
        batch = translate.Batch(request.event_ids, _event_id)
        discarded = await self._outbox_admin.discard(current_caller().subject, batch.good)
        return job_admin_service_pb2.DiscardOutboxEventsResponse(results=_in_order(request.event_ids, batch, discarded))


def _filter(
    message: job_admin_service_pb2.ListOutboxEventsRequest | job_admin_service_pb2.DeadEvents,
) -> EventFilter:
    return EventFilter(
        event_type=translate.optional_identifier("event_type", message.event_type),
        queue=translate.optional_identifier("queue", message.queue),
        job_id=translate.optional_identifier("job_id", message.job_id),
    )


def _event_id(value: str) -> str:
    return translate.identifier("event_ids", value)


def _event(row: EventDetail) -> job_admin_service_pb2.OutboxEventInfo:
    return job_admin_service_pb2.OutboxEventInfo(
        event_id=row.event_id,
        event_type=row.event_type,
        job_id=row.aggregate_id,
        dedupe_key=row.dedupe_key,
        payload_json=row.payload_json,
        status=STATUSES[row.status],
        queue=row.queue,
        attempts=row.attempt_count,
        last_error=row.last_error or "",
        dispatcher_id=row.locked_by or "",
        create_time=translate.timestamp(row.created_at),
        available_time=translate.timestamp(row.available_at),
        settle_time=translate.timestamp(row.settled_at),
        claim_end_time=translate.timestamp(row.claim_until),
    )


def _result(each: EventResult) -> job_admin_service_pb2.OutboxEventResult:
    message = job_admin_service_pb2.OutboxEventResult(event_id=each.event_id, job_id=each.job_id)
    if isinstance(each.result, AijobsError):
        message.error.CopyFrom(_error(each.result))
    else:
        message.outcome = OUTCOMES[each.result]
    return message


def _error(error: AijobsError) -> lifecycle_service_pb2.ItemError:
    return lifecycle_service_pb2.ItemError(reason=error.reason, message=error.message)


def _in_order(
    event_ids: Sequence[str], batch: translate.Batch[str], results: Sequence[EventResult]
) -> list[job_admin_service_pb2.OutboxEventResult]:
    """Return an answer for every id that came in, also for those that are none."""
    answers = batch.answers(
        results,
        accepted=_result,
        refused=lambda error: job_admin_service_pb2.OutboxEventResult(error=error),
    )
    for event_id, answer in zip(event_ids, answers, strict=True):
        answer.event_id = event_id
    return answers
