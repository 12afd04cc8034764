"""The jobs service's OutboxService as the relay calls it: protobuf messages end here."""

from collections.abc import Mapping, Sequence
from datetime import UTC, timedelta
from typing import TypeAlias, assert_never

import grpc
from google.protobuf.duration_pb2 import Duration

from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import outbox_service_pb2, outbox_service_pb2_grpc
from services.dispatcher.messages import SENDABLE, ClaimedEvent
from services.dispatcher.relay import Claim, Published, PublishFailed, Released, Settlement

#: As the stubs for type checkers name it; at run time it is made by `OutboxServiceStub`.
Stub: TypeAlias = "outbox_service_pb2_grpc.OutboxServiceAsyncStub"
#: On top of the wait: what the claim itself may take.
CALL_TIMEOUT = timedelta(seconds=10)


class OutboxClient:
    """Implements `services.dispatcher.relay.OutboxPort` over gRPC.

    Args:
        replica: leads to the replica whose commits are to wake our claims; closed with the client.
        any_replica: leads to all of them: what one that is gone has given is settled with another, and asked for there.
        dispatcher_id: this process.

    """

    def __init__(self, replica: grpc.aio.Channel, any_replica: grpc.aio.Channel, dispatcher_id: str) -> None:
        self._channel = replica
        self._replica: Stub = outbox_service_pb2_grpc.OutboxServiceStub(replica)
        self._any_replica: Stub = outbox_service_pb2_grpc.OutboxServiceStub(any_replica)
        self._dispatcher_id = dispatcher_id

    async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
        """Claim events."""
        span = Duration()
        span.FromTimedelta(wait)
        request = outbox_service_pb2.ClaimEventsRequest(
            dispatcher_id=self._dispatcher_id,
            claim_token=claim_token,
            event_types=list(SENDABLE),
            max_events=limit,
            wait=span,
            ready_messages=ready,
        )
        return await _claimed(self._replica, request, wait + CALL_TIMEOUT)

    async def held(self, claim_token: str) -> Claim:
        """Ask what a claim holds."""
        request = outbox_service_pb2.ClaimEventsRequest(
            dispatcher_id=self._dispatcher_id, claim_token=claim_token, event_types=list(SENDABLE)
        )
        return await _claimed(self._any_replica, request, CALL_TIMEOUT)

    async def settle(self, claim_token: str, settlements: Sequence[Settlement]) -> Sequence[str]:
        """Settle events."""
        request = outbox_service_pb2.SettleEventsRequest(
            claim_token=claim_token, items=[_settlement(settlement) for settlement in settlements]
        )
        try:
            response = await self._any_replica.SettleEvents(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [
            settlement.event_id
            for settlement, result in zip(settlements, response.results, strict=True)
            if result.HasField("error")
        ]

    async def close(self) -> None:
        """Close the channel to the replica."""
        await self._channel.close()


async def _claimed(stub: Stub, request: outbox_service_pb2.ClaimEventsRequest, within: timedelta) -> Claim:
    try:
        response = await stub.ClaimEvents(request, timeout=within.total_seconds())
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return Claim(events=[_event(event) for event in response.events], lease=response.lease.ToTimedelta())


def _event(message: outbox_service_pb2.OutboxEvent) -> ClaimedEvent:
    return ClaimedEvent(
        event_id=message.event_id,
        event_type=message.event_type,
        aggregate_id=message.aggregate_id,
        dedupe_key=message.dedupe_key,
        payload_json=message.payload_json,
        created_at=message.create_time.ToDatetime(tzinfo=UTC),
        trace_context=message.trace_context,
    )


def _settlement(settlement: Settlement) -> outbox_service_pb2.EventSettlement:
    message = outbox_service_pb2.EventSettlement(event_id=settlement.event_id)
    match settlement.result:
        case Published():
            message.published.SetInParent()
        case PublishFailed(reason=reason):
            message.failed.reason = reason
            message.failed.retryable = True
        case Released():
            message.released.SetInParent()
        case never:
            assert_never(never)
    return message
