"""The client's end of a connection: keepalive, balancing, retries, a deadline and a token on every call."""

import json
from collections.abc import AsyncIterable, Callable, Iterable
from datetime import timedelta
from typing import Any

import grpc

from aijobs.rpc.address import check_target

DEFAULT_TIMEOUT = timedelta(seconds=10)

#: No `timeout` in here: it fires early in grpcio, and the server is not told of it (D4).
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],
            # Every call may be repeated: writes carry a request id or a token made by the caller (ruling 33).
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    # Not below the 20 s that our servers allow.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # How long to wait for a connection, and between tries: a restarted service is found again within seconds.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # An executor whose session breaks has a second to come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Services are neighbours; a proxy for the web between them only breaks things.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str, token: str | None = None) -> grpc.aio.Channel:
    """Open a channel; it connects with the first call. Close it, or use it as a context manager.

    Unary calls without a timeout of their own get 10 s; streams get none.

    Args:
        address: `host:port`, or `dns:///host:port` to follow changing addresses of a name.
        token: bearer token to send with every call.

    Raises:
        ValueError: the address is none, or the token cannot be one. The message does not repeat the token.

    """
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("bad token: expected printable ASCII characters without blanks")
    details = _CallDetails(token)
    return grpc.aio.insecure_channel(
        check_target(address), options=_OPTIONS, interceptors=[_Unary(details), _ServerStream(details), _Bidi(details)]
    )


class _CallDetails:
    """Completes the details of a call, for the three interceptors: grpcio takes one kind of call per class."""

    def __init__(self, token: str | None) -> None:
        self._authorization = f"Bearer {token}" if token else None

    def complete(
        self, details: grpc.aio.ClientCallDetails, default_timeout: timedelta | None
    ) -> grpc.aio.ClientCallDetails:
        timeout = details.timeout
        if timeout is None and default_timeout is not None:
            timeout = default_timeout.total_seconds()
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        if self._authorization is not None:
            metadata.add("authorization", self._authorization)
        return grpc.aio.ClientCallDetails(
            details.method, timeout, metadata, details.credentials, details.wait_for_ready
        )


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, details: _CallDetails) -> None:
        self._details = details

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._details.complete(client_call_details, DEFAULT_TIMEOUT), request)


class _ServerStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, details: _CallDetails) -> None:
        self._details = details

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._details.complete(client_call_details, None), request)


class _Bidi(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, details: _CallDetails) -> None:
        self._details = details

    async def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: AsyncIterable[Any] | Iterable[Any],
    ) -> Any:
        return await continuation(self._details.complete(client_call_details, None), request_iterator)
