"""OutboxService: what dispatchers call."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, assert_never

import grpc

from aijobs.definition import Queue
from aijobs.errors import InvalidInput
from aijobs.v1 import outbox_service_pb2, outbox_service_pb2_grpc
from services.jobs.outbox import Claim, Outbox, Published, PublishFailed, Released, SettleRequest
from services.jobs.rpc import translate

LONGEST_WAIT = timedelta(seconds=20)
MOST_EVENTS = 100
MOST_TYPES = 100


class OutboxServicer(outbox_service_pb2_grpc.OutboxServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def ClaimEvents(
        self, request: outbox_service_pb2.ClaimEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> outbox_service_pb2.ClaimEventsResponse:
        """Wait for events and hand them out."""
        del context
        if not 0 <= request.max_events <= MOST_EVENTS:
            raise InvalidInput.field("max_events", f"must be from 0 to {MOST_EVENTS}")
        if not 1 <= len(request.event_types) <= MOST_TYPES:
            raise InvalidInput.field("event_types", f"name the 1 to {MOST_TYPES} event types that you can send")
        events = await self._outbox.claim(
            Claim(
                token=translate.token("claim_token", request.claim_token),
                dispatcher_id=translate.identifier("dispatcher_id", request.dispatcher_id),
                event_types=[translate.identifier("event_types", name) for name in request.event_types],
                ready=_ready_messages(request.ready_messages),
                limit=request.max_events,
                wait=translate.span("wait", request.wait, most=LONGEST_WAIT),
            )
        )
        return outbox_service_pb2.ClaimEventsResponse(
            events=[
                outbox_service_pb2.OutboxEvent(
                    event_id=event.event_id,
                    event_type=event.event_type,
                    aggregate_type=event.aggregate_type,
                    aggregate_id=event.aggregate_id,
                    dedupe_key=event.dedupe_key,
                    payload_json=event.payload_json,
                    create_time=translate.timestamp(event.created_at),
                    trace_context=event.trace_context or "",
                )
                for event in events
            ],
            lease=translate.duration(self._outbox.claim_time),
        )

    async def SettleEvents(
        self, request: outbox_service_pb2.SettleEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> outbox_service_pb2.SettleEventsResponse:
        """Store what became of events."""
        del context
        claim_token = translate.token("claim_token", request.claim_token)
        batch = translate.Batch(request.items, _settle_request)
        results = batch.answers(
            await self._outbox.settle(claim_token, batch.good),
            accepted=lambda _: outbox_service_pb2.SettleResult(),
            refused=lambda error: outbox_service_pb2.SettleResult(error=error),
        )
        return outbox_service_pb2.SettleEventsResponse(results=results)


def _ready_messages(depths: Mapping[str, int]) -> dict[str, int]:
    if any(ready < 0 for ready in depths.values()):
        raise InvalidInput.field("ready_messages", "must not be negative")
    # A newer dispatcher may know more queues than we do.
    return {queue: ready for queue, ready in depths.items() if queue in list(Queue)}


def _settle_request(message: outbox_service_pb2.EventSettlement) -> SettleRequest:
    event_id = translate.identifier("items.event_id", message.event_id)
    match message.WhichOneof("settlement"):
        case "published":
            return SettleRequest(event_id=event_id, result=Published())
        case "failed":
            reason = translate.identifier("items.failed.reason", message.failed.reason, most=64)
            return SettleRequest(
                event_id=event_id, result=PublishFailed(reason=reason, retryable=message.failed.retryable)
            )
        case "released":
            return SettleRequest(event_id=event_id, result=Released())
        case None:
            raise InvalidInput.field("items.settlement", "missing: say what became of the event")
        case never:
            assert_never(never)
