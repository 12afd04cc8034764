"""One of our services as a child process: started, awaited by its gRPC health, killed and restarted at will."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from deploy.local.guarded import GuardedProcess, ProcessFailedError, tail
from deploy.local.lifeline import Lifeline

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN = timedelta(seconds=30)
STOP_WITHIN = timedelta(seconds=20)
_CHECK_SECONDS = 1
_PAUSE_SECONDS = 0.05
# Channels share connections, and one that was refused waits longer and longer before it tries again.
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
# What a server may answer before it serves; anything else will not get better by waiting.
_NOT_YET = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND}


class ServiceProcess:
    """A service in a process of its own. It ends when its lifeline is abandoned.

    Args:
        name: for messages.
        arguments: of the Python interpreter, such as `["-m", "services.jobs"]`.
        address: `host:port` where its health is asked.
        environment: replaces and adds to `inherited`.
        log: its output is appended there.
        lifeline: what it hangs on.
        inherited: the rest of its environment; that of this process if unset.

    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Sequence[str],
        address: str,
        environment: Mapping[str, str],
        log: Path,
        lifeline: Lifeline,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._command = [sys.executable, *arguments]
        self._environment = {**(os.environ if inherited is None else inherited), **environment}
        self._lifeline = lifeline
        self._process: GuardedProcess | None = None

    @property
    def pid(self) -> int | None:
        """The service's process; None before the first start and after the end."""
        return self._process.pid if self._process is not None and self._process.running else None

    async def start(self, *, within: timedelta = READY_WITHIN) -> None:
        """Start the service; its health is SERVING when this returns.

        Raises:
            ProcessFailedError: it ended or was not ready in time. The message quotes the end of its log.

        """
        await self.launch()
        try:
            await self.ready(within=within)
        except BaseException:  # raised on, also a cancellation; a half-started service may not stay
            await self.kill()
            raise

    async def launch(self) -> None:
        """Start the process and do not wait until it serves."""
        self._process = await GuardedProcess.start(
            self._command, lifeline=self._lifeline, log=self.log, environment=self._environment, folder=ROOT
        )

    async def ready(self, *, within: timedelta = READY_WITHIN) -> None:
        """Wait until the service's health is SERVING.

        Raises:
            ProcessFailedError: it ended or was not ready in time. The message quotes the end of its log.

        """
        process = self._started()
        last = "nothing"
        try:
            async with asyncio.timeout(within.total_seconds()):
                while True:
                    process.require_running(self.name)
                    last = await self.health()
                    if last == "SERVING":
                        return
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as error:
            raise ProcessFailedError(
                f"{self.name} was not ready on {self.address} within {within}; it answered {last}\n{tail(self.log)}"
            ) from error

    async def health(self) -> str:
        """Ask the service's health once: SERVING, NOT_SERVING, or why there is no answer.

        Raises:
            ProcessFailedError: what listens there is not one of our services.

        """
        async with grpc.aio.insecure_channel(self.address, options=_OWN_CONNECTION) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = await check(health_pb2.HealthCheckRequest(service=""), timeout=_CHECK_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NOT_YET:
                    raise ProcessFailedError(
                        f"{self.name} on {self.address} answered {error.code().name} to a health check: "
                        f"{error.details()}\n{tail(self.log)}"
                    ) from error
                return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def wait(self) -> int:
        """Wait for the end of the service and return its exit status (128 + n for signal n)."""
        return await self._started().wait()

    async def stop(self, *, patience: timedelta = STOP_WITHIN) -> None:
        """Ask the service to end (SIGTERM); kill it if it has not after `patience`."""
        if self._process is not None:
            await self._process.stop(patience=patience)

    async def kill(self) -> None:
        """End the service by SIGKILL, also when it is frozen."""
        if self._process is not None:
            await self._process.kill()

    def freeze(self) -> None:
        """Let the service hang (SIGSTOP)."""
        self._started().signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen service go on."""
        self._started().signal(signal.SIGCONT)

    async def restart(self) -> None:
        """Stop the service if it runs and start it on the same address.

        Raises:
            ProcessFailedError: it ended or was not ready in time.

        """
        await self.stop()
        await self.start()

    def _started(self) -> GuardedProcess:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process
