"""The jobs service's OutboxService as the relay calls it."""

from collections.abc import Sequence
from datetime import timedelta

import grpc
from google.protobuf.duration_pb2 import Duration

from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import outbox_service_pb2, outbox_service_pb2_grpc
from aijobs.v1.outbox_service_pb2 import EventSettlement, OutboxEvent
from services.dispatcher.messages import SENDABLE

#: On top of the wait: what the claim itself may take.
CALL_TIMEOUT = timedelta(seconds=10)


class OutboxClient:
    """Implements `services.dispatcher.relay.OutboxPort` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, dispatcher_id: str) -> None:
        self._stub: outbox_service_pb2_grpc.OutboxServiceAsyncStub = outbox_service_pb2_grpc.OutboxServiceStub(channel)
        self._dispatcher_id = dispatcher_id

    async def claim(self, claim_token: str, limit: int, wait: timedelta) -> tuple[Sequence[OutboxEvent], timedelta]:
        """Claim events."""
        span = Duration()
        span.FromTimedelta(wait)
        request = outbox_service_pb2.ClaimEventsRequest(
            dispatcher_id=self._dispatcher_id,
            claim_token=claim_token,
            event_types=list(SENDABLE),
            max_events=limit,
            wait=span,
        )
        try:
            response = await self._stub.ClaimEvents(request, timeout=(wait + CALL_TIMEOUT).total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response.events, response.lease.ToTimedelta()

    async def settle(self, claim_token: str, settlements: Sequence[EventSettlement]) -> Sequence[str]:
        """Settle events."""
        request = outbox_service_pb2.SettleEventsRequest(claim_token=claim_token, items=settlements)
        try:
            response = await self._stub.SettleEvents(request, timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [
            settlement.event_id
            for settlement, result in zip(settlements, response.results, strict=True)
            if result.HasField("error")
        ]
