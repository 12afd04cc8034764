"""The gRPC server of a service: our stages around every call, health and reflection."""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aijobs.rpc.address import Address
from aijobs.rpc.auth import TokenVerifier, require_loopback
from aijobs.rpc.calls import AroundCalls
from aijobs.rpc.interceptors import Draining, stages
from aijobs.service import CannotRun

_OPTIONS = [
    # Otherwise a second server on the same port starts silently and takes half of the connections (D19).
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
    ("grpc.http2.max_ping_strikes", 3),
    # Clients look up new replicas only when a connection ends, so each one ends after a while.
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_connection_age_grace_ms", 30_000),
    ("grpc.max_connection_idle_ms", 900_000),
]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_log = structlog.stdlib.get_logger("aijobs.rpc")


class CannotListenError(CannotRun):
    """The address to listen on is taken, or is not one of this machine."""


class RpcServer:
    """Serves some services on one address.

    Health has the names "" and "readiness" (follow `set_ready`), "liveness" (from start to stop) and one for each
    service (as readiness). Reflection is v1alpha, the one that grpcio has; it knows the error details too
    (`aijobs.rpc.status` loads them), so that tools can decode them.

    Args:
        listen: `host:port`; port 0 picks a free one.
        verifier: who may call; None: everybody on this machine.

    Raises:
        ValueError: the address is none, or is not on loopback although there is no verifier.

    """

    def __init__(self, listen: str, verifier: TokenVerifier | None) -> None:
        self._listen = Address.parse(listen)
        if verifier is None:
            require_loopback(listen)
        self._draining = Draining()
        self._interceptor = AroundCalls(stages(verifier, self._draining))
        self._services: dict[str, tuple[Callable[[Any, grpc.aio.Server], None], object]] = {}
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def add(self, service_name: str, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Add a service, before `start`.

        Args:
            service_name: full name, for example `aijobs.v1.JobService`.
            add_to_server: the generated `add_<Service>Servicer_to_server`.
            servicer: its implementation.

        """
        self._services[service_name] = (add_to_server, servicer)

    async def start(self) -> int:
        """Start serving, not ready yet, and return the port.

        Raises:
            CannotListenError: the address is taken or not ours.

        """
        # gRPC would say so too, but with a line of its own between ours.
        if (problem := _problem(self._listen)) is not None:
            raise CannotListenError(problem)
        server = grpc.aio.server(interceptors=[self._interceptor], options=_OPTIONS)
        for add_to_server, servicer in self._services.values():
            add_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(str(self._listen))
        except RuntimeError as error:
            raise CannotListenError(f"cannot listen on {self._listen}: taken a moment ago") from error
        await self._health.set("liveness", _SERVING)
        await self.set_ready(False)
        await server.start()
        self._server = server
        _log.info("serving", address=str(Address(host=self._listen.host, port=port)), services=list(self._services))
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tell probes and load balancers whether to send calls here."""
        for name in ("", "readiness", *self._services):
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    async def stop(self, grace: timedelta) -> None:
        """Stop: not ready, then streams and long polls end, then running calls have `grace` to finish. Repeatable."""
        server, self._server = self._server, None
        if server is None:
            return
        await self.set_ready(False)
        self._draining.end_calls()
        await server.stop(grace.total_seconds())


def _problem(address: Address) -> str | None:
    """Ask the system what is wrong with listening on an address, which gRPC does not tell; None: nothing."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of an earlier process that are not quite over are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return f"cannot listen on {address}: {error.strerror or error}"
    return None
