"""Following a job through cut connections (JobService.WatchJob).

A stream may end at any time: replicas restart and connections are renewed every few minutes. The watch goes on where
it was, by the number of the last change it has seen, so that its reader sees each change once and in order.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import TypeAlias

import grpc

from aijobs.client.repetition import Patience
from aijobs.errors import AijobsError, Unreachable
from aijobs.rpc.job_states import TERMINAL_VALUES
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import job_service_pb2

#: The server sends something every 15 s; three times that in silence is a dead stream.
LONGEST_SILENCE = timedelta(seconds=45)

OpenStream: TypeAlias = "Callable[[job_service_pb2.WatchJobRequest], _Call]"
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[job_service_pb2.WatchJobRequest, job_service_pb2.WatchJobResponse]"


class Watch:
    """One watch of one job. Iterate over `updates()` once.

    Args:
        open_stream: starts WatchJob.
        request: what to watch, from which change on.
        address: what is called, for errors.
        patience: how long to go on without an answer.

    """

    def __init__(
        self,
        open_stream: OpenStream,
        request: job_service_pb2.WatchJobRequest,
        *,
        address: str,
        patience: timedelta,
    ) -> None:
        self._open_stream = open_stream
        self._request = request
        self._address = address
        self._patience = Patience(patience)
        self._seen: int | None = request.after_sequence if request.HasField("after_sequence") else None
        self._over = False
        self._started = False

    async def updates(self) -> AsyncGenerator[job_service_pb2.WatchJobResponse, None]:
        """Yield the job as it is, then every change in order, and end after the terminal one.

        Raises:
            AijobsError: refused, or cut off for longer than the patience.

        """
        while not self._over:
            try:
                async with aclosing(self._one_stream()) as updates:
                    async for update in updates:
                        yield update
            except AijobsError as error:
                await self._patience.after(error)

    async def _one_stream(self) -> AsyncGenerator[job_service_pb2.WatchJobResponse, None]:
        request = job_service_pb2.WatchJobRequest()
        request.CopyFrom(self._request)
        if self._seen is not None:
            request.after_sequence = self._seen
        resumed, first = self._started, True
        stream = self._open_stream(request)
        terminal = False
        try:
            while (message := await self._read(stream)) is not None:
                self._patience.renew()
                if not message.HasField("job"):
                    continue
                terminal = message.job.state in TERMINAL_VALUES
                if self._is_news(message, repeats_the_job=resumed and first):
                    self._started = True
                    yield message
                first = False
                if self._over:
                    return
        finally:
            stream.cancel()
        # A stream that ends before the job has is one more kind of cut.
        self._over = terminal
        if not terminal:
            raise Unreachable(self._address, "the watch was cut")

    def _is_news(self, message: job_service_pb2.WatchJobResponse, *, repeats_the_job: bool) -> bool:
        if not message.HasField("transition"):
            if self._seen is None:
                self._seen = message.job.sequence
            return not repeats_the_job
        if self._seen is not None and message.transition.sequence <= self._seen:
            return False
        self._seen = message.transition.sequence
        self._over = message.transition.to_state in TERMINAL_VALUES
        return True

    async def _read(self, stream: _Call) -> job_service_pb2.WatchJobResponse | None:
        try:
            async with asyncio.timeout(LONGEST_SILENCE.total_seconds()):
                message = await stream.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, address=self._address) from error
        except TimeoutError as error:
            raise Unreachable(self._address, "the watch fell silent") from error
        return message if isinstance(message, job_service_pb2.WatchJobResponse) else None
