"""A service of ours reduced to its health: what `ServiceProcess` and `make up` see of one.

Modes: `serve`; `refuse` ends at once with an explanation; `starting` never gets ready.
"""

import asyncio
import os
import signal
import sys

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def serve(ready: bool) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health = HealthServicer()
    add_HealthServicer_to_server(health, server)
    serving = health_pb2.HealthCheckResponse
    await health.set("", serving.SERVING if ready else serving.NOT_SERVING)
    server.add_insecure_port(os.environ["AIJOBS_LISTEN"])
    await server.start()
    say("serving")
    await stopping.wait()
    await server.stop(1)
    say("stopped in an orderly way")


def main(mode: str) -> int:
    for name in sorted(os.environ):
        if name.startswith("AIJOBS_"):
            say(f"{name}={os.environ[name]}")
    if mode == "refuse":
        say("no: the queue is made of cheese")
        return 3
    asyncio.run(serve(ready=mode == "serve"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
