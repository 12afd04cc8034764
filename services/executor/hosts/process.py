"""A process for one execution: its code can crash, hang or hold the interpreter, and only its own run is lost (EX-11).

Used for job types that ask for it, and for runs that were taken over twice: whoever has ended two executors is not
given a third one to end.

Models are asked here, so that budget, ledger and keys stay with the executor. The child is killed when its execution is
over, with whatever it has started, unless that has left its process group. It is protection from accidents: code that
means harm has the same user's rights as the executor.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import structlog

from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.harness import BudgetExceeded, CancellationReason, RunOver
from aijobs.job_type import ModelRequest
from aijobs.logs import place_of
from aijobs.registry import model_reference
from services.executor.handlers import ABANDON_AFTER, HandlerExit, HandlerLoop
from services.executor.hosts import frames
from services.executor.hosts.frames import Frame
from services.executor.hosts.port import Facts, Means, Output, Projected
from services.executor.outcomes import FollowUpJob, ProjectedArtifact, ProjectedRow

#: Settings of the executor, keys of providers among them, are none of a handler's business. Their names have no case.
OURS = "AIJOBS_"
#: A process that is killed is gone soon; one that is not, hangs in the kernel, and nobody can wait for that.
GONE_WITHIN = timedelta(seconds=2)
LAST_WORDS_WITHIN = timedelta(milliseconds=200)
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
        self._heard_bytes = 0
        self._number = 0
        #: Kept open as long as we live: its other end is how the child's guard hears of our end.
        self._lifeline: int | None = None

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
        with _understood():
            return Output(text=result["text"], hash=result["hash"])

    async def project(self, facts: Facts) -> Projected:
        """Let the child call the projector."""
        result = await self._step({"step": "project", "facts": _facts(facts)})
        with _understood():
            return Projected(
                artifacts=[ProjectedArtifact(**artifact) for artifact in result["artifacts"]],
                follow_ups=[FollowUpJob(**follow_up) for follow_up in result["follow_ups"]],
                rows=[ProjectedRow(**row) for row in result["rows"]],
            )

    async def close(self) -> None:
        """Kill the child, and wait until it is gone."""
        await self._end_calls()
        if self._writer is not None:
            # At once: something that the child has started may hold the other end open.
            self._writer.transport.abort()
        if self._process is not None:
            _kill(self._process)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._process is None:
            return
        try:
            async with asyncio.timeout(GONE_WITHIN.total_seconds()):
                await self._process.wait()
        except TimeoutError:
            log.error("a handler's process does not end though killed", handler=self._name, pid=self._process.pid)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        waits, self._lifeline = os.pipe()
        try:
            with theirs:
                environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(OURS)}
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "services.executor.hosts.child", str(theirs.fileno()), str(waits)),
                    pass_fds=[theirs.fileno(), waits],
                    stdin=asyncio.subprocess.DEVNULL,
                    # A group of its own, so that what it starts ends with it.
                    start_new_session=True,
                    env=environment,
                )
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            # A child that has been started all the same ends when there is nobody at the other end.
            ours.close()
            raise
        finally:
            os.close(waits)
        definition = self._definition
        self._send(
            {
                "job_type": self._name,
                "input": model_reference(definition.input.model),
                "output": model_reference(definition.output.model),
                "executor": definition.executor,
                "projector": definition.projector,
                "path": sys.path,
            }
        )

    async def _step(self, frame: Frame, means: Means | None = None) -> Frame:
        """Do a step and return its result; serve what the child asks for meanwhile.

        Cancelled, it tells the child, and gives it a second to clean up.
        """
        self._number += 1
        self._send({**frame, "number": self._number})
        listening = asyncio.ensure_future(self._listen(means))
        try:
            return await asyncio.shield(listening)
        except asyncio.CancelledError:
            reason = means.run.cancellation.reason if means else None
            with contextlib.suppress(HandlerExit):
                self._send({"cancel": reason or CancellationReason.INTERNAL_FAILURE})
            await self._end_calls()
            await asyncio.wait({listening}, timeout=ABANDON_AFTER.total_seconds())
            raise
        finally:
            listening.cancel()
            await asyncio.wait({listening})
            if not listening.cancelled():
                listening.exception()

    async def _end_calls(self) -> None:
        """End the model calls that are under way, and let their rows be settled."""
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=ABANDON_AFTER.total_seconds())

    async def _listen(self, means: Means | None) -> Frame:
        with _understood():
            while True:
                if (result := self._heard(await self._receive_or_die(), means)) is not None:
                    return result
                # However much it says: everybody else's turn comes in between.
                await asyncio.sleep(0)

    def _heard(self, frame: Frame, means: Means | None) -> Frame | None:
        """Take in what the child says; return the result if the step has one.

        Raises:
            ExecutionFailed: the step has failed.
            HandlerExit: the code ended in a way of its own.
            KeyError: or TypeError, ValueError: the frame is none of ours.

        """
        match frame:
            case {"progress": int(percent)}:
                if means is not None:
                    means.progress(max(0, min(100, int(percent))))
            case {"call": int(number), "request": request}:
                if means is None:
                    # What is left of a handler, after its return.
                    self._send({"call": number, "over": True})
                else:
                    if len(self._calls) >= frames.MOST_OPEN_CALLS:
                        raise ValueError("too many calls at once")
                    task = asyncio.ensure_future(self._ask(number, frames.asked(dict(request)), means))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
            case {"number": number} if number != self._number:
                pass  # a copy of the child, made by a fork, ends an earlier step again
            case {"failed": failure}:
                raise frames.failed(failure)
            case {"exit": str(error)}:
                raise HandlerExit(error)
            case {"result": result}:
                return dict(result)
            case _:
                raise ValueError("no frame of ours")
        return None

    async def _ask(self, number: int, asked: ModelRequest, means: Means) -> None:
        """Ask a model for the child. That it is told of the answer costs the run nothing if it is gone."""
        try:
            answer = await self._handlers.run(lambda: means.models.generate_json(asked), self._name)
            reply: Frame = {"answer": answer}
        except ExecutionFailed as error:
            reply = {"failed": frames.failure(error)}
        except BudgetExceeded as error:
            reply = {"budget": [error.limit, error.message]}
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

    async def _receive_or_die(self) -> Frame:
        """Wait for what the child says next, or for its end, which a process that it has started may hide."""
        if self._process is None:
            raise HandlerExit("its process was never started")
        receiving = asyncio.ensure_future(self._receive())
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Its last words are here already, if it had any.
                await asyncio.wait({receiving}, timeout=LAST_WORDS_WITHIN.total_seconds())
            if receiving.done():
                return receiving.result()
            raise ExecutionFailed("INTERNAL_HANDLER_DIED", await self._last_words())
        finally:
            for task in (receiving, ending):
                task.cancel()
            await asyncio.wait({receiving, ending})

    async def _receive(self) -> Frame:
        if self._reader is None:
            raise HandlerExit("its process was never started")
        try:
            (size,) = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
            self._heard_bytes += size
            if size > frames.LARGEST_FRAME or self._heard_bytes > frames.LARGEST_TALK:
                raise HandlerExit("its process says too much")
            return frames.unpack(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
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


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Take nonsense for the end of the code that said it: somebody's code may write to the connection, too."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise HandlerExit("its process says what nobody understands") from error


def _facts(facts: Facts) -> Frame:
    return {
        "job_id": facts.job_id,
        "job_type": facts.job_type,
        "user_id": facts.user_id,
        "attempt": facts.attempt,
        "execution": facts.execution,
        "depth": facts.depth,
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
