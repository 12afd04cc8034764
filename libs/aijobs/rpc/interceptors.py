"""The stages around every call: request log, errors, authentication, draining and deadlines."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic

import grpc
import structlog

from aijobs.errors import AijobsError, DeadlineExceeded, InternalError, PermissionDenied, ShuttingDown, Unauthenticated
from aijobs.rpc.auth import ANYONE, Caller, TokenVerifier, set_current_caller
from aijobs.rpc.calls import RunningCall, Stage
from aijobs.rpc.roles import is_open, roles_of
from aijobs.rpc.status import to_status

#: For unary calls whose client sent no deadline.
DEFAULT_DEADLINE = timedelta(seconds=10)
#: Unary calls that wait on purpose and bound themselves.
LONG_POLLS = frozenset({"aijobs.v1.OutboxService/ClaimEvents"})

_log = structlog.stdlib.get_logger("aijobs.rpc")
_OUR_FAULT = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})


@asynccontextmanager
async def request_log(call: RunningCall) -> AsyncIterator[None]:
    """Write one line a call: method, status, duration. Never what was sent or answered (AP-6)."""
    started = monotonic()
    code = grpc.StatusCode.OK
    try:
        yield
    except asyncio.CancelledError:
        # The client went away or its deadline passed; both are its right.
        code = grpc.StatusCode.CANCELLED
        raise
    except BaseException:  # raised on; abort and cancellation are no Exceptions, and have their line too
        code = _code_of(call) or grpc.StatusCode.UNKNOWN
        raise
    finally:
        level = "error" if code in _OUR_FAULT else "debug" if is_open(call.method) else "info"
        milliseconds = round((monotonic() - started) * 1000, 1)
        getattr(_log, level)("call", method=call.method, code=code.name, ms=milliseconds)


@asynccontextmanager
async def error_mapping(call: RunningCall) -> AsyncIterator[None]:
    """Turn every exception into a status: typed errors into their own, anything else into a silent INTERNAL (AP-3)."""
    try:
        yield
    except AijobsError as error:
        if isinstance(error, InternalError):
            _log.error("internal error", method=call.method, exc_info=True)
        await call.context.abort_with_status(to_status(error))
    except grpc.aio.BaseError:  # a handler's own abort, already on its way
        raise
    except Exception:  # noqa: BLE001 - the boundary: whatever a handler raises becomes a status
        _log.exception("unexpected error", method=call.method)
        silent = InternalError("something went wrong inside the service; its log has the details")
        await call.context.abort_with_status(to_status(silent))


class Authentication:
    """Finds out who calls and whether it may (AP-4). The handler reads the result with `current_caller()`.

    Args:
        verifier: None lets every caller in with every role; the server then listens on loopback only.

    """

    def __init__(self, verifier: TokenVerifier | None) -> None:
        self._verifier = verifier

    @asynccontextmanager
    async def __call__(self, call: RunningCall) -> AsyncIterator[None]:
        """Let the call through or refuse it.

        Raises:
            Unauthenticated: no token, or one that does not hold.
            PermissionDenied: none of the caller's roles may call the method, or no role may.

        """
        if not is_open(call.method):
            caller = self._caller(call)
            allowed = roles_of(call.method)
            if caller.roles.isdisjoint(allowed):
                needed = " or ".join(sorted(allowed)) or "a role that does not exist"
                raise PermissionDenied(f"{call.method} needs the role {needed}")
            set_current_caller(caller)
        yield

    def _caller(self, call: RunningCall) -> Caller:
        if self._verifier is None:
            return ANYONE
        values = call.metadata("authorization")
        if len(values) != 1:
            raise Unauthenticated("the call needs exactly one metadata entry `authorization: Bearer <token>`")
        scheme, _, token = values[0].partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("the authorization of the call is not of the form `Bearer <token>`")
        return self._verifier.verify(token.strip())


class Draining:
    """Ends streams and long polls when the server stops: they would hold it for the whole grace otherwise (D20)."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()

    @asynccontextmanager
    async def __call__(self, call: RunningCall) -> AsyncIterator[None]:
        """Keep the call among those that `end_calls` ends, if it is one that stays open.

        Raises:
            ShuttingDown: `end_calls` ended it.

        """
        task = asyncio.current_task()
        if task is None or not (call.streaming or call.method in LONG_POLLS):
            yield
            return
        self._open.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise ShuttingDown from None
        finally:
            self._open.discard(task)
            self._ended.discard(task)

    def end_calls(self) -> None:
        """End the streams and long polls that are open now."""
        for task in self._open:
            self._ended.add(task)
            task.cancel()


@asynccontextmanager
async def deadline(call: RunningCall) -> AsyncIterator[None]:
    """Bound unary calls whose client sent no deadline; gRPC itself cancels the handler of those that did.

    Raises:
        DeadlineExceeded: the time ran out. A TimeoutError of the handler's own is none of that and passes.

    """
    if call.streaming or call.method in LONG_POLLS or call.context.time_remaining() is not None:
        yield
        return
    limit = asyncio.timeout(DEFAULT_DEADLINE.total_seconds())
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the call took longer than {DEFAULT_DEADLINE.total_seconds():g} s") from error


def stages(verifier: TokenVerifier | None, draining: Draining) -> Sequence[Stage]:
    """Return what surrounds every call of a server, outermost first."""
    return (request_log, error_mapping, Authentication(verifier), draining, deadline)


def _code_of(call: RunningCall) -> grpc.StatusCode | None:
    """Return the status that an abort has set; gRPC gives it as a number or as a member."""
    code: object = call.context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((status for status in grpc.StatusCode if status.value[0] == code), None)
