"""Asks a gRPC server for its health: `python health.py HOST:PORT`; exits 0 only if it serves.

For containers: it needs nothing but grpcio, and the image has no shell tools for gRPC.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2

TIMEOUT_SECONDS = 3


def serves(address: str) -> bool:
    """Tell whether the server at `host:port` answers SERVING within 3 s."""
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=""), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if serves(sys.argv[1]) else 1)
