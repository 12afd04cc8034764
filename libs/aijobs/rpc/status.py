"""Errors on the wire: `google.rpc.Status` with one ErrorInfo (AP-2).

Fields that are wrong go into a BadRequest, limits that are reached into a QuotaFailure, waits into a RetryInfo. What is
written here is read here: a client gets an error of the class that the server raised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import (  # type: ignore[import-untyped]  # it has no py.typed
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RetryInfo,
)
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # as above
from grpc_status import rpc_status

from aijobs.errors import (
    DOMAIN,
    AijobsError,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidInput,
    PayloadTooLarge,
    PermissionDenied,
    QuotaViolation,
    ServerBusy,
    Unauthenticated,
    Unimplemented,
    UnknownRefusal,
    Unreachable,
)

# Everything travels in the trailing metadata, the message twice, in base64 and in percent encoding (three characters
# for a byte), and gRPC clients take 8 KiB by default. All in bytes of UTF-8.
LONGEST_MESSAGE = 500
LONGEST_FIELD = 100
#: A user id has up to 128 characters; a subject that is cut names nobody.
LONGEST_SUBJECT = 160
LONGEST_DESCRIPTION = 300
#: Those of fields and those of quotas together.
LONGEST_VIOLATIONS = 3000

_MessageT = TypeVar("_MessageT", bound=Message)


def to_status(error: AijobsError) -> grpc.Status:
    """Return an error as gRPC sends it. Long texts are cut and only the first violations named: it always fits."""
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"advice": error.advice})]
    room = LONGEST_VIOLATIONS
    if error.violations:
        bad = _bad_request(error.violations, room)
        details.append(bad)
        room -= bad.ByteSize()
    if error.quota_violations:
        details.append(_quota_failure(error.quota_violations, room))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromTimedelta(error.retry_after)
        details.append(RetryInfo(retry_delay=delay))
    status = Status(code=error.status.value[0], message=_cut(error.message, LONGEST_MESSAGE))
    for detail in details:
        status.details.add().Pack(detail)
    answer = rpc_status.to_status(status)
    if error.status is grpc.StatusCode.UNAVAILABLE and not error.transient:
        # gRPC's own retries would only ask three times more.
        metadata = (*answer.trailing_metadata, ("grpc-retry-pushback-ms", "-1"))
        return _Answer(code=answer.code, details=answer.details, trailing_metadata=metadata)
    return answer


@dataclass(frozen=True)
class _Answer(grpc.Status):
    """A status with metadata of ours."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def _bad_request(violations: Sequence[FieldViolation], room: int) -> Message:
    bad = BadRequest()
    for violation in violations:
        bad.field_violations.add(
            field=_cut(violation.field, LONGEST_FIELD), description=_cut(violation.description, LONGEST_DESCRIPTION)
        )
        if bad.ByteSize() > room:
            del bad.field_violations[-1]
            break
    message: Message = bad
    return message


def _quota_failure(violations: Sequence[QuotaViolation], room: int) -> Message:
    failure = QuotaFailure()
    for violation in violations:
        failure.violations.add(
            subject=_cut(violation.subject, LONGEST_SUBJECT),
            description=_cut(violation.description, LONGEST_DESCRIPTION),
        )
        if failure.ByteSize() > room:
            del failure.violations[-1]
            break
    message: Message = failure
    return message


def from_rpc_error(error: grpc.aio.AioRpcError, *, address: str = "") -> AijobsError:
    """Return the error that a server raised, or the one that stands for a bare gRPC status.

    Args:
        error: what a call ended with.
        address: what was called, to be named when nothing answers there.

    """
    message = error.details() or ""
    details = list(_details(error))
    info = _first(details, ErrorInfo)
    if info is None or info.domain != DOMAIN:
        return _from_bare_status(error.code(), message, address)
    retry = _first(details, RetryInfo)
    bad = _first(details, BadRequest)
    quota = _first(details, QuotaFailure)
    known = {kind.reason: kind for kind in _kinds(AijobsError)}.get(info.reason)
    if known is None:
        advice = info.metadata.get("advice", "") or "See the documentation of the service for this reason."
        return UnknownRefusal(message, reason=info.reason, status=error.code(), advice=advice)
    return known.rebuilt(
        message,
        violations=[] if bad is None else [FieldViolation(v.field, v.description) for v in bad.field_violations],
        quota_violations=[] if quota is None else [QuotaViolation(v.subject, v.description) for v in quota.violations],
        retry_after=None if retry is None else _timedelta(retry.retry_delay),
    )


def _from_bare_status(code: grpc.StatusCode, message: str, address: str) -> AijobsError:
    """Answer what gRPC itself, or a proxy, said: there is no reason, only a status and a text."""
    error: AijobsError
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            error = Unreachable(address, _why_unreachable(message))
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            error = DeadlineExceeded("the service did not answer in time")
        case grpc.StatusCode.UNIMPLEMENTED:
            error = Unimplemented("the service does not know this call")
        case grpc.StatusCode.UNAUTHENTICATED:
            error = Unauthenticated(message or "the call was not authenticated")
        case grpc.StatusCode.PERMISSION_DENIED:
            error = PermissionDenied(message or "the call was not permitted")
        case grpc.StatusCode.INVALID_ARGUMENT:
            error = InvalidInput(message or "the request was refused as invalid")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in message:
            error = PayloadTooLarge("the message is larger than the 4 MiB that a call may carry")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            error = ServerBusy(message or "the service is busy")
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN | grpc.StatusCode.DATA_LOSS:
            error = InternalError("the service failed without saying why")
        case _:
            error = UnknownRefusal(
                message or f"the call was refused with {code.name}",
                reason=code.name,
                status=code,
                advice="Check that the address is that of an aijobs service.",
            )

    return error


def _why_unreachable(message: str) -> str:
    """Return what a person can use of gRPC's own text, which names sockets and retries."""
    text = message.lower()
    for sign, why in (
        ("connection refused", "connection refused"),
        ("errors resolving", "its name cannot be resolved"),
        ("dns resolution failed", "its name cannot be resolved"),
        ("timed out", "no answer"),
        ("unreachable", "no route to it"),
        ("failed parsing http/2", "it does not speak gRPC"),
    ):
        if sign in text:
            return why
    return ""


def _details(error: grpc.aio.AioRpcError) -> Iterator[Any]:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it works on aio errors too
    except (ValueError, DecodeError):  # a proxy's details that contradict the call's own status
        return
    if status is not None:
        yield from status.details


def _first(details: list[Any], kind: type[_MessageT]) -> _MessageT | None:
    for detail in details:
        if detail.TypeName() == kind.DESCRIPTOR.full_name:
            message = kind()
            detail.Unpack(message)
            return message
    return None


def _kinds(base: type[AijobsError]) -> Iterator[type[AijobsError]]:
    for kind in base.__subclasses__():
        if hasattr(kind, "reason"):
            yield kind
        yield from _kinds(kind)


def _timedelta(duration: Duration) -> timedelta:
    return timedelta(seconds=duration.seconds, microseconds=duration.nanos // 1000)


def _cut(text: str, longest: int) -> str:
    encoded = text.encode()
    return text if len(encoded) <= longest else encoded[: longest - 3].decode(errors="ignore") + "…"
