"""What becomes of statuses that no server of ours has made, and of errors that are too large."""

import grpc
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # it has no py.typed
from grpc_status import rpc_status

from aijobs.errors import (
    AijobsError,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidInput,
    PayloadTooLarge,
    PermissionDenied,
    QuotaExceeded,
    QuotaViolation,
    ServerBusy,
    TooManyJobs,
    Unauthenticated,
    Unimplemented,
    UnknownRefusal,
    Unreachable,
)
from aijobs.rpc.status import from_rpc_error, to_status


def bare(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", Unreachable),
        (grpc.StatusCode.CANCELLED, "", Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", Unimplemented),
        (grpc.StatusCode.UNAUTHENTICATED, "", Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "", PermissionDenied),
        (grpc.StatusCode.INVALID_ARGUMENT, "", InvalidInput),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)", PayloadTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", ServerBusy),
        (grpc.StatusCode.INTERNAL, "", InternalError),
        (grpc.StatusCode.UNKNOWN, "", InternalError),
        (grpc.StatusCode.DATA_LOSS, "", InternalError),
        (grpc.StatusCode.NOT_FOUND, "no such route", UnknownRefusal),
        (grpc.StatusCode.FAILED_PRECONDITION, "", UnknownRefusal),
    ],
)
def test_a_bare_status_becomes_an_error_of_the_same_meaning(
    code: grpc.StatusCode, details: str, kind: type[AijobsError]
) -> None:
    error = from_rpc_error(bare(code, details), address="jobs:50051")
    assert type(error) is kind
    assert error.message
    assert error.advice


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_there_is_becomes_an_error(code: grpc.StatusCode) -> None:
    assert from_rpc_error(bare(code)).reason


def test_details_that_contradict_the_status_are_not_believed() -> None:
    metadata = grpc.aio.Metadata(*to_status(PermissionDenied("no")).trailing_metadata)
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "no")
    assert isinstance(from_rpc_error(error), Unreachable)


def test_another_domain_s_details_are_not_ours() -> None:
    status = rpc_status.to_status(Status(code=5, message="gone"))
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, "gone")
    assert isinstance(from_rpc_error(error), UnknownRefusal)


FIELDS = [FieldViolation("f" * 1000, "\N{SNOWMAN}" * 1000)] * 1000
QUOTAS = [QuotaViolation("user:" + "u" * 1000, "\N{SNOWMAN}" * 1000)] * 1000


def received(error: AijobsError) -> AijobsError:
    """What a client makes of an error that a server sent."""
    status = to_status(error)
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details))


@pytest.mark.parametrize(
    ("fields", "quotas"), [(FIELDS, []), ([], QUOTAS), (FIELDS, QUOTAS)], ids=["fields", "quotas", "both"]
)
def test_an_error_never_outgrows_what_clients_take_as_metadata(
    fields: list[FieldViolation], quotas: list[QuotaViolation]
) -> None:
    error = InvalidInput("\N{SNOWMAN}" * 100_000, violations=fields, quota_violations=quotas)
    status = to_status(error)
    percent_encoded = 3 * len(status.details.encode())
    base64 = sum(len(value) for _, value in status.trailing_metadata) * 4 / 3
    assert percent_encoded + base64 < 8 << 10


@pytest.mark.parametrize("kind", [TooManyJobs, QuotaExceeded])
def test_an_exceeded_quota_says_whose_and_which(kind: type[AijobsError]) -> None:
    quotas = (QuotaViolation("user:u-1", "30 of 30 jobs today"), QuotaViolation("user:u-1", "99 of 99 this month"))
    got = received(kind("no more jobs today", quota_violations=quotas))
    assert type(got) is kind
    assert got.quota_violations == quotas
    assert got.violations == ()


def test_an_error_without_a_quota_sends_none() -> None:
    assert received(InvalidInput.field("input", "no")).quota_violations == ()


def test_the_longest_user_id_is_named_in_full() -> None:
    quota = QuotaViolation("user:" + "u" * 128, "30 of 30 jobs today")
    assert received(QuotaExceeded("no", quota_violations=[quota])).quota_violations == (quota,)


def test_of_very_many_quotas_the_first_ones_arrive_cut() -> None:
    got = received(QuotaExceeded("no", quota_violations=QUOTAS))
    assert 1 < len(got.quota_violations) < 20
    first = got.quota_violations[0]
    assert first.subject.startswith("user:uuu")
    assert first.subject.endswith("…")
    assert first.description.endswith("\N{SNOWMAN}…")
