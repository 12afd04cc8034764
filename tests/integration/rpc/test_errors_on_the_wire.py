"""Every error that a handler raises reaches the client as the same class with the same content."""

import asyncio
from collections.abc import Awaitable
from datetime import timedelta

import grpc
import pytest
from structlog.testing import capture_logs

from aijobs.errors import (
    AijobsError,
    DeadlineExceeded,
    EventNotFound,
    ExecutorNotFound,
    FieldViolation,
    InternalError,
    InvalidInput,
    JobAlreadyCancelled,
    JobNotFound,
    PayloadTooLarge,
    PlatformUnavailable,
    QuotaExceeded,
    QuotaViolation,
    RequestIdReused,
    ShuttingDown,
    Unimplemented,
    UnknownJobType,
    UnknownRefusal,
    Unreachable,
)
from aijobs.rpc.channel import open_channel
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import job_service_pb2, job_service_pb2_grpc, outbox_service_pb2, outbox_service_pb2_grpc
from tests.integration.rpc.serving import ScriptedJobs, ScriptedOutbox, serving


def every_kind(base: type[AijobsError] = AijobsError) -> list[type[AijobsError]]:
    return [kind for direct in base.__subclasses__() for kind in (direct, *every_kind(direct))]


def an_error(kind: type[AijobsError]) -> AijobsError:
    if kind is UnknownJobType:
        return UnknownJobType("nope", known=["alpha", "beta"])
    if kind in (JobNotFound, JobAlreadyCancelled, EventNotFound, ExecutorNotFound, Unreachable):
        return kind("some-id")
    if kind in (RequestIdReused, ShuttingDown):
        return kind()
    if kind is UnknownRefusal:
        return UnknownRefusal("no", reason="QUOTA_FROM_THE_FUTURE", status=grpc.StatusCode.ABORTED, advice="Wait.")
    return kind(
        f"a {kind.__name__}",
        violations=[FieldViolation("input.text", "too long"), FieldViolation("labels", "too many")],
        quota_violations=[
            QuotaViolation("user:u-1", "30 of 30 jobs today"),
            QuotaViolation("user:u-1", "5 of 5 alive"),
        ],
        retry_after=timedelta(seconds=3, milliseconds=250),
    )


async def refusal(call: Awaitable[object]) -> AijobsError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value, address="there")


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
async def test_an_error_arrives_as_the_class_that_was_raised(kind: type[AijobsError]) -> None:
    sent = an_error(kind)

    async def get(request, context):
        raise sent

    async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert type(got) is kind
    assert (got.reason, got.status, got.message, got.advice) == (sent.reason, sent.status, sent.message, sent.advice)
    assert (got.violations, got.quota_violations) == (sent.violations, sent.quota_violations)
    assert got.retry_after == sent.retry_after


async def test_an_error_in_the_middle_of_a_stream_arrives_the_same() -> None:
    async def watch(request, context):
        yield job_service_pb2.WatchJobResponse()
        raise JobNotFound("gone")

    async with serving(ScriptedJobs(watch=watch)) as address, open_channel(address) as channel:
        stream = job_service_pb2_grpc.JobServiceStub(channel).WatchJob(job_service_pb2.WatchJobRequest())
        assert await stream.read() == job_service_pb2.WatchJobResponse()
        got = await refusal(stream.read())
    assert isinstance(got, JobNotFound)


async def test_an_error_with_very_many_fields_still_fits() -> None:
    async def get(request, context):
        raise InvalidInput.fields([FieldViolation(f"input.field_{n}", "é" * 500) for n in range(500)])

    async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert type(got) is InvalidInput
    assert got.violations[0].field == "input.field_0"


async def test_an_error_with_very_many_quotas_still_fits() -> None:
    async def get(request, context):
        raise QuotaExceeded("no", quota_violations=[QuotaViolation(f"user:u-{n}", "é" * 500) for n in range(500)])

    async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert type(got) is QuotaExceeded
    assert got.quota_violations[0].subject == "user:u-0"


async def test_an_unexpected_exception_is_internal_and_tells_the_caller_nothing() -> None:
    async def get(request, context):
        raise RuntimeError("password is hunter2 at /srv/x")

    with capture_logs() as logs:
        async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
            got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert isinstance(got, InternalError)
    assert "hunter2" not in got.message
    assert "/srv" not in got.message
    assert [line["exc_info"] for line in logs if line["event"] == "unexpected error"] == [True]
    call = next(line for line in logs if line["event"] == "call")
    assert (call["log_level"], call["code"], call["method"]) == ("error", "INTERNAL", "aijobs.v1.JobService/GetJob")


async def test_a_timeout_error_of_the_handler_itself_is_a_fault_and_no_deadline() -> None:
    async def get(request, context):
        raise TimeoutError

    async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert isinstance(got, InternalError)


async def test_a_deadline_shorter_than_the_handler_ends_both() -> None:
    cancelled = asyncio.Event()

    async def get(request, context):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with capture_logs() as logs:
        async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            got = await refusal(stub.GetJob(job_service_pb2.GetJobRequest(), timeout=0.2))
            async with asyncio.timeout(5):
                await cancelled.wait()
    assert isinstance(got, DeadlineExceeded)
    assert [line["log_level"] for line in logs if line["event"] == "call"] == ["info"]


async def test_a_call_without_a_deadline_gets_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.rpc.interceptors.DEFAULT_DEADLINE", timedelta(milliseconds=100))

    async def get(request, context):
        await asyncio.Event().wait()

    async with serving(ScriptedJobs(get=get)) as address, grpc.aio.insecure_channel(address) as channel:
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest()))
    assert isinstance(got, DeadlineExceeded)
    assert got.message == "the call took longer than 0.1 s"


async def test_long_polls_and_streams_have_no_deadline_of_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.rpc.interceptors.DEFAULT_DEADLINE", timedelta(milliseconds=50))
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, late.set)

    async def claim(request, context):
        await late.wait()
        return outbox_service_pb2.ClaimEventsResponse()

    async def watch(request, context):
        await late.wait()
        yield job_service_pb2.WatchJobResponse()

    async with (
        serving(ScriptedJobs(watch=watch), outbox=ScriptedOutbox(claim)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        poll = outbox_service_pb2_grpc.OutboxServiceStub(channel).ClaimEvents(outbox_service_pb2.ClaimEventsRequest())
        stream = job_service_pb2_grpc.JobServiceStub(channel).WatchJob(job_service_pb2.WatchJobRequest())
        assert await poll == outbox_service_pb2.ClaimEventsResponse()
        assert await stream.read() == job_service_pb2.WatchJobResponse()


async def test_a_client_that_goes_away_is_no_error_in_the_log_and_cancels_the_handler() -> None:
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def get(request, context):
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with capture_logs() as logs:
        async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel, asyncio.timeout(5):
            call = job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest())
            waiting = asyncio.ensure_future(call)
            await running.wait()
            waiting.cancel()
            await cancelled.wait()
    assert [(line["log_level"], line["code"]) for line in logs if line["event"] == "call"] == [("info", "CANCELLED")]
    assert not any(line["log_level"] == "error" for line in logs)


async def test_leaving_a_stream_closes_its_handler() -> None:
    closed = asyncio.Event()

    async def watch(request, context):
        try:
            while True:
                yield job_service_pb2.WatchJobResponse()
                await asyncio.Event().wait()
        finally:
            closed.set()

    async with serving(ScriptedJobs(watch=watch)) as address, open_channel(address) as channel, asyncio.timeout(5):
        stream = job_service_pb2_grpc.JobServiceStub(channel).WatchJob(job_service_pb2.WatchJobRequest())
        await stream.read()
        stream.cancel()
        await closed.wait()


async def test_a_message_over_4_mib_is_too_large_by_name() -> None:
    async with serving() as address, open_channel(address) as channel:
        request = job_service_pb2.CreateJobRequest(input_json="x" * (5 << 20))
        got = await refusal(job_service_pb2_grpc.JobServiceStub(channel).CreateJob(request))
    assert isinstance(got, PayloadTooLarge)


async def test_a_service_that_is_not_there_is_unimplemented() -> None:
    async with serving() as address, open_channel(address) as channel:
        stub = outbox_service_pb2_grpc.OutboxServiceStub(channel)
        got = await refusal(stub.SettleEvents(outbox_service_pb2.SettleEventsRequest()))
    assert isinstance(got, Unimplemented)


async def test_the_log_never_holds_what_was_sent() -> None:
    with capture_logs() as logs:
        async with serving() as address, open_channel(address, "canary-token") as channel:
            request = job_service_pb2.CreateJobRequest(input_json='"canary-input"', user_id="canary-user")
            await job_service_pb2_grpc.JobServiceStub(channel).CreateJob(request)
    assert next(line for line in logs if line["event"] == "call")["code"] == "OK"
    assert "canary" not in str(logs)


async def test_a_refusal_that_no_repeat_helps_is_not_repeated_by_the_channel() -> None:
    """UNAVAILABLE is what gRPC repeats by itself; this one ends when an operator says so."""
    calls = []

    async def create(request, context):
        calls.append(request)
        raise PlatformUnavailable("no jobs are created at the moment")

    async with serving(ScriptedJobs(create=create)) as address, open_channel(address) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        error = await refusal(stub.CreateJob(job_service_pb2.CreateJobRequest()))
    assert isinstance(error, PlatformUnavailable)
    assert len(calls) == 1
