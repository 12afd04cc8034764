"""A process for one execution: its code can crash, hang or hold the interpreter, and only its own run is lost (EX-11).

Used for job types that ask for it, and for runs that were taken over twice: whoever has ended two executors is not
given a third one to end.

The child has its own input and output; models are asked here, so that budget, ledger and keys never leave the executor.
It is killed, with whatever it has started, when its execution is over.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import structlog

from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, CancellationReason, RunOver
from aijobs.logs import place_of
from aijobs.registry import model_reference
from services.executor.handlers import ABANDON_AFTER, HandlerExit, HandlerLoop
from services.executor.hosts import frames
from services.executor.hosts.frames import Frame
from services.executor.hosts.port import Facts, Means, Output, Projected
from services.executor.outcomes import FollowUpJob, ProjectedArtifact, ProjectedRow

#: Settings of the executor, keys of providers among them, are none of a handler's business.
OURS = "AIJOBS_"
#: A process that is killed is gone soon; one that is not, hangs in the kernel, and nobody can wait for that.
GONE_WITHIN = timedelta(seconds=2)
log = structlog.get_logger()


class ProcessHost:
    """Implements `services.executor.hosts.port.Host` with a child process, started at the first step.

    Args:
        handlers: where models are asked.
        definition: of the job type; the child loads its code again, by name.

    """

    def __init__(self, handlers: HandlerLoop, definition: JobDefinition) -> None:
        self._handlers = handlers
        self._definition = definition
        self._name = definition.job_type
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def read_input(self, snapshot_json: str) -> None:
        """Start the child and let it validate the snapshot."""
        await self._start()
        await self._step({"step": "read_input", "snapshot_json": snapshot_json})

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Let the child call the handler; ask models for it meanwhile."""
        run = means.run
        limits = run.budget.limits
        result = await self._step(
            {
                "step": "execute",
                "facts": _facts(facts),
                "session_id": run.session_id,
                "run_id": run.run_id,
                "seconds": max(means.harness.remaining(run).total_seconds(), 0.001),
                "limits": {name: getattr(limits, name) for name in limits.__slots__},
            },
            means,
        )
        return Output(text=result["text"], hash=result["hash"])

    async def project(self, facts: Facts) -> Projected:
        """Let the child call the projector."""
        result = await self._step({"step": "project", "facts": _facts(facts)})
        return Projected(
            artifacts=[ProjectedArtifact(**artifact) for artifact in result["artifacts"]],
            follow_ups=[FollowUpJob(**follow_up) for follow_up in result["follow_ups"]],
            rows=[ProjectedRow(**row) for row in result["rows"]],
        )

    async def close(self) -> None:
        """Kill the child, and wait until it is gone."""
        for task in self._calls:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        _kill(self._process)
        try:
            async with asyncio.timeout(GONE_WITHIN.total_seconds()):
                await self._process.wait()
        except TimeoutError:
            log.error("a handler's process does not end though killed", handler=self._name, pid=self._process.pid)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.executor.hosts.child", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                # A group of its own, so that what it starts ends with it.
                start_new_session=True,
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        definition = self._definition
        self._send(
            {
                "job_type": self._name,
                "input": model_reference(definition.input.model),
                "output": model_reference(definition.output.model),
                "executor": definition.executor,
                "projector": definition.projector,
            }
        )

    async def _step(self, frame: Frame, means: Means | None = None) -> Frame:
        """Do a step and return its result; serve what the child asks for meanwhile.

        Cancelled, it tells the child, and gives it a second to clean up.
        """
        self._send(frame)
        listening = asyncio.ensure_future(self._listen(means))
        try:
            return await asyncio.shield(listening)
        except asyncio.CancelledError:
            if not listening.done():
                reason = means.run.cancellation.reason if means else None
                self._send({"cancel": reason or CancellationReason.INTERNAL_FAILURE})
                await asyncio.wait({listening}, timeout=ABANDON_AFTER.total_seconds())
            listening.cancel()
            await asyncio.wait({listening})
            if not listening.cancelled():
                listening.exception()
            raise

    async def _listen(self, means: Means | None) -> Frame:
        while True:
            frame = await self._receive()
            match frame:
                case {"progress": int(percent)} if means is not None:
                    means.progress(percent)
                case {"call": int(number), "request": request} if means is not None:
                    task = asyncio.ensure_future(self._ask(number, request, means))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case {"failed": failure}:
                    raise frames.failed(failure)
                case {"exit": str(error)}:
                    raise HandlerExit(error)
                case {"result": result}:
                    return dict(result)
                case _:
                    raise HandlerExit("its process says what nobody understands")

    async def _ask(self, number: int, request: Mapping[str, Any], means: Means) -> None:
        """Ask a model for the child. That it is told of the answer costs the run nothing if it is gone."""
        try:
            asked = frames.asked(dict(request))
            answer = await self._handlers.run(lambda: means.models.generate_json(asked), self._name)
            reply: Frame = {"answer": answer}
        except ExecutionFailed as error:
            reply = {"failed": frames.failure(error)}
        except BudgetExceeded as error:
            reply = {"budget": [error.limit, str(error)]}
        except RunOver:
            reply = {"over": True}
        except Exception as error:  # noqa: BLE001 - whatever it is, the child waits for an answer
            reply = {"broken": place_of(error)}
        with contextlib.suppress(HandlerExit):
            self._send({"call": number, **reply})

    def _send(self, frame: Frame) -> None:
        if self._writer is None or self._writer.is_closing():
            raise HandlerExit("its process is gone")
        self._writer.write(frames.pack(frame))

    async def _receive(self) -> Frame:
        if self._reader is None:
            raise HandlerExit("its process was never started")
        try:
            (size,) = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
            if size > frames.LARGEST_FRAME:
                raise HandlerExit("its process says too much at once")
            return dict(json.loads(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise ExecutionFailed("INTERNAL_HANDLER_DIED", await self._last_words()) from error

    async def _last_words(self) -> str:
        """Say how the child ended."""
        if self._process is None:
            return "its process was never started"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_AFTER.total_seconds()):
                await self._process.wait()
        match self._process.returncode:
            case None:
                return "its process closed the connection"
            case code if code < 0:
                return f"its process was ended by {_signal_name(-code)}"
            case code:
                return f"its process ended with status {code}"


def _facts(facts: Facts) -> Frame:
    return {
        "job_id": facts.job_id,
        "job_type": facts.job_type,
        "user_id": facts.user_id,
        "attempt": facts.attempt,
        "execution": facts.execution,
        "earlier_errors": [[error.code, error.feedback] for error in facts.earlier_errors],
    }


def _kill(process: asyncio.subprocess.Process) -> None:
    # The group too when the child is gone: what it has started may still be there.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
