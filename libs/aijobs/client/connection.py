"""A connection to the jobs service: a channel, a deadline for each call, safe repeats, typed errors."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from aijobs.client.repetition import Patience
from aijobs.rpc.channel import DEFAULT_TIMEOUT, open_channel
from aijobs.rpc.status import from_rpc_error
from aijobs.tracing import TRACEPARENT
from aijobs.v1 import job_admin_service_pb2_grpc, job_service_pb2_grpc

_ResponseT = TypeVar("_ResponseT", bound=Message)


class Connection:
    """What all calls of a client share. Use it as an async context manager.

    Args:
        address: `host:port` or `dns:///host:port`.
        token: bearer token; None if the service asks for none.
        timeout: for each try of a call that is no stream.
        patience: how long calls are repeated, and a cut watch is resumed, while the service cannot be reached.

    Raises:
        ValueError: the address or the token cannot be one.

    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        patience: timedelta = timedelta(seconds=30),
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._patience = patience
        self._channel = open_channel(address, token)
        self._jobs = job_service_pb2_grpc.JobServiceStub(self._channel)
        self._admin = job_admin_service_pb2_grpc.JobAdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        """Return the client; it connects with the first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _call(
        self,
        method: Callable[..., Awaitable[_ResponseT]],
        request: Message,
        *,
        limit: timedelta | None = None,
        traceparent: str | None = None,
    ) -> _ResponseT:
        """Call, and repeat while that is worth it. `limit` is for each try; None: the client's timeout."""
        metadata = ((TRACEPARENT, traceparent),) if traceparent else None
        patience = Patience(self._patience)
        seconds = (self._timeout if limit is None else limit).total_seconds()
        while True:
            try:
                return await method(request, timeout=seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                refusal = from_rpc_error(error, address=self._address)
            # Outside of the handler: a caller reads our error alone, without gRPC's before it.
            await patience.after(refusal)
