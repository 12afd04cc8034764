"""`python -m services.executor.hosts.child SOCKET LIFELINE`: run the code of one execution for an executor (EX-11).

It ends when its executor does, however that ends: a guard, a process beside it, waits for that and kills them all.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import count
from pkgutil import resolve_name

from aijobs import logs
from aijobs.canonical import JsonObject
from aijobs.clock import steady_clock
from aijobs.failures import ExecutionFailed
from aijobs.harness import (
    BudgetExceeded,
    CancellationReason,
    Harness,
    RetryPolicies,
    RunBudgetLimits,
    RunContext,
    RunOver,
    RunState,
    RunTermination,
)
from aijobs.job_type import EarlierError, ModelRequest
from aijobs.logs import place_of
from services.executor.handlers import log_loop_exception
from services.executor.hosts import frames
from services.executor.hosts.code import ExecutionCode, JobTypeCode
from services.executor.hosts.frames import Frame
from services.executor.hosts.port import Facts, Means

EXHAUSTED = "BUDGET_EXHAUSTED"


class Connection:
    """The executor at the other end."""

    def __init__(self, descriptor: int) -> None:
        # Not for what the code starts: it would hide the end of this process.
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Say something. From any thread."""
        data = frames.pack(frame)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> Frame | None:
        """Wait for the next frame; None: there is nobody any more."""
        header = self._read(frames.HEADER.size)
        body = self._read(frames.HEADER.unpack(header)[0]) if header else b""
        return frames.unpack(body) if body else None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except OSError:
                return b""
            if not part:
                return b""
            data += part
        return bytes(data)


class RemoteModels:
    """Implements `aijobs.job_type.ModelGateway` by asking the executor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}

    async def generate_json(self, request: ModelRequest) -> JsonObject:
        """Ask a model once; see `aijobs.job_type.ModelGateway`."""
        number = next(self._numbers)
        answered = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            self._connection.send({"call": number, "request": frames.request(request)})
            reply = await answered
        finally:
            del self._waiting[number]
        match reply:
            case {"answer": dict(answer)}:
                return answer
            case {"failed": failure}:
                raise frames.failed(failure)
            case {"budget": [limit, message]}:
                raise BudgetExceeded(limit, message)
            case {"over": True}:
                raise RunOver(
                    RunTermination(state=RunState.CANCELLED, reason="the execution is over", at=datetime.now(UTC))
                )
            case _:
                raise ExecutionFailed("INTERNAL_PROVIDER_ERROR", str(reply.get("broken", "")))

    def answer(self, frame: Frame) -> None:
        """Take in the answer to a call."""
        answered = self._waiting.get(frame["call"])
        if answered is not None and not answered.done():
            answered.set_result(frame)


class Child:
    """Does the steps that the executor names, one at a time."""

    def __init__(self, connection: Connection, code: JobTypeCode) -> None:
        self._connection = connection
        self._code = ExecutionCode(code)
        self._models = RemoteModels(connection)
        self._step: asyncio.Task[None] | None = None
        self._run: RunContext | None = None
        self._harness: Harness | None = None

    def take(self, frame: Frame) -> None:
        """Take in what the executor says; on the event loop."""
        if "step" in frame:
            self._step = asyncio.ensure_future(self._do(frame))
        elif "call" in frame:
            self._models.answer(frame)
        elif "cancel" in frame and self._step is not None:
            if self._run is not None and self._harness is not None:
                self._harness.cancel(self._run, CancellationReason(frame["cancel"]))
            self._step.cancel()

    async def _do(self, frame: Frame) -> None:
        try:
            reply: Frame = {"result": await self._result(frame)}
            if (end := self._ended()) is not None:
                # Its handler went on all the same.
                reply = {"failed": frames.failure(end)}
        except ExecutionFailed as error:
            reply = {"failed": frames.failure(error)}
        except BudgetExceeded as error:
            reply = {"failed": frames.failure(ExecutionFailed(EXHAUSTED, str(error)))}
        except RunOver as error:
            reply = {"exit": str(error)}
        except BaseException as error:  # noqa: BLE001 - it ends this execution and nothing else
            reply = {"exit": type(error).__name__ if not isinstance(error, Exception) else place_of(error)}
        number = {"number": frame["number"]}
        try:
            self._connection.send(number | reply)
        except (TypeError, ValueError) as error:
            # Too large, or nothing that can be said: the executor must not wait for it.
            self._connection.send(number | {"exit": place_of(error)})

    async def _result(self, frame: Frame) -> Frame:
        match frame["step"]:
            case "read_input":
                self._code.read_input(frame["snapshot_json"])
                return {}
            case "execute":
                return asdict(await self._code.execute(_facts(frame["facts"]), self._means(frame)))
            case _:
                return asdict(self._code.project(_facts(frame["facts"])))

    def _means(self, frame: Frame) -> Means:
        """Build the run once more: its tools are called in here, its models in the executor, which counts them."""
        self._harness = Harness(
            clock=steady_clock(),
            make_run_id=lambda: frame["run_id"],
            longest_run=timedelta(seconds=frame["seconds"]),
            limits=RunBudgetLimits(**frame["limits"]),
            retry_policies=RetryPolicies.strict(),
        )
        self._run = self._harness.start(frame["session_id"])
        return Means(run=self._run, harness=self._harness, models=self._models, progress=self._report)

    def _ended(self) -> ExecutionFailed | None:
        termination = self._run.lifecycle.termination if self._run is not None else None
        if termination is None or termination.state is not RunState.BUDGET_EXHAUSTED:
            return None
        return ExecutionFailed(EXHAUSTED, termination.detail)

    def _report(self, percent: int) -> None:
        self._connection.send({"progress": percent})


def _facts(frame: Frame) -> Facts:
    errors = [EarlierError(code=code, feedback=feedback) for code, feedback in frame["earlier_errors"]]
    return Facts(**{**frame, "earlier_errors": errors})


def _code(frame: Frame) -> JobTypeCode:
    return JobTypeCode(
        job_type=frame["job_type"],
        input=resolve_name(frame["input"]),
        output=resolve_name(frame["output"]),
        execute=resolve_name(frame["executor"]),
        project=resolve_name(frame["projector"]) if frame["projector"] else None,
    )


async def _serve(connection: Connection, child: Child) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_exception)

    def listen() -> None:
        while (frame := connection.receive()) is not None:
            loop.call_soon_threadsafe(child.take, frame)
        os._exit(0)

    threading.Thread(target=listen, name="executor", daemon=True).start()
    # The thread ends the process.
    await asyncio.Event().wait()


def _guard(lifeline: int, connection: int) -> None:
    """Leave a process behind that ends this one, and whatever it starts, when the executor is gone.

    A process, because the code may hold the interpreter, so that no thread of this one gets its turn.
    """
    if os.fork():
        os.close(lifeline)
        return
    os.close(connection)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(lifeline, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run until the executor is done with this process."""
    descriptor, lifeline = map(int, sys.argv[1:3])
    _guard(lifeline, descriptor)
    logs.configure("executor", "info")
    connection = Connection(descriptor)
    start = connection.receive()
    if start is None:
        return
    sys.path += [folder for folder in start["path"] if folder not in sys.path]
    try:
        code = _code(start)
    except Exception as error:  # noqa: BLE001 - its message may repeat anything (AP-6)
        connection.send({"number": 1, "exit": place_of(error)})
        return
    try:
        asyncio.run(_serve(connection, Child(connection, code)))
    except BaseException:  # noqa: BLE001 - its loop is broken, by closed descriptors perhaps; nothing of it is worth saying
        os._exit(1)


if __name__ == "__main__":
    main()
