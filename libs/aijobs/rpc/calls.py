"""What every call of a server passes through, whatever its kind.

gRPC has four kinds of handlers; an interceptor only sees the handler before it runs. `AroundCalls` wraps each kind in
one coroutine and runs it inside a list of stages, so that a stage is written once, as a context manager:

    request log ─▶ error mapping ─▶ authentication ─▶ draining ─▶ deadline ─▶ handler
"""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from aijobs.errors import InvalidInput

# Quoted here and below: these classes are generic in the type stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """One call as the stages see it."""

    #: As in `roles.METHOD_ROLES`, for example `aijobs.v1.JobService/GetJob`.
    method: str
    #: True if the answer is a stream: it may stay open for long.
    streaming: bool
    context: Context

    def metadata(self, key: str) -> list[str]:
        """Return the values of one metadata key (lower case) that the client sent."""
        pairs = self.context.invocation_metadata() or ()
        return [str(value) for name, value in pairs if name == key]


class Stage(Protocol):
    """Something that happens around every call."""

    def __call__(self, call: RunningCall) -> AbstractAsyncContextManager[None]:
        """Return what surrounds the call. Exceptions of the handler pass through it and may be replaced."""
        ...


class AroundCalls(grpc.aio.ServerInterceptor):
    """Runs every handler inside the stages, the first one outermost."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Replace a handler by one that runs it inside the stages; unknown methods stay UNIMPLEMENTED."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.lstrip("/")
        match (handler.request_streaming, handler.response_streaming):
            case (False, False):
                make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
            case (False, True):
                make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
            case (True, False):
                make, behaviour = grpc.stream_unary_rpc_method_handler, handler.stream_unary
            case _:
                make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        # A request that cannot be decoded is refused inside the stages: gRPC would answer UNKNOWN, before anybody
        # has asked who calls.
        inside, outside = handler.request_deserializer, None
        if handler.request_streaming:
            inside, outside = None, handler.request_deserializer
        wrapped: Any = self._wrap(method, behaviour, inside, streaming=handler.response_streaming)
        return make(wrapped, outside, handler.response_serializer)

    def _wrap(
        self,
        method: str,
        behaviour: Callable[[Any, Context], Any],
        decode: Callable[[bytes], Any] | None,
        *,
        streaming: bool,
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def run(request: Any, context: Context) -> Any:
            answer: Any
            call = RunningCall(method=method, streaming=streaming, context=context)
            async with AsyncExitStack() as stack:
                for stage in self._stages:
                    await stack.enter_async_context(stage(call))
                if decode is not None:
                    request = _decoded(request, decode)
                answer = behaviour(request, context)
                if inspect.isasyncgen(answer):
                    await _send_all(answer, context)
                    return None
                return await answer

        return run


def _decoded(request: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(request)
    except DecodeError as error:
        raise InvalidInput.field("request", "cannot be decoded: broken, not UTF-8, or nested too deep") from error


async def _send_all(messages: AsyncGenerator[Any, Any], context: Context) -> None:
    """Send what a handler yields, in the task of the call, and close the handler whatever happens."""
    try:
        async for message in messages:
            await context.write(message)
    finally:
        await messages.aclose()
