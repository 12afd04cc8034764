"""Bad fields of every service, over real gRPC: a typed error that names the field, never INTERNAL or UNKNOWN."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from aijobs.errors import AijobsError, InvalidInput
from aijobs.rpc.channel import open_channel
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import (
    job_service_pb2,
    job_service_pb2_grpc,
    lifecycle_service_pb2,
    lifecycle_service_pb2_grpc,
    outbox_service_pb2,
    outbox_service_pb2_grpc,
)
from services.standalone.engine import embedded

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKEN = "t" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[grpc.aio.Channel]:
    folder: Path = tmp_path_factory.mktemp("engine")
    async with embedded(folder / "jobs.db", asyncio.Event()) as address, open_channel(address) as channel:
        yield channel


def not_a_number() -> Struct:
    struct = Struct()
    struct["number"] = float("nan")
    return struct


def create(**changes: Any) -> job_service_pb2.CreateJobRequest:
    good = {"request_id": "r", "user_id": "u", "job_type": "synthetic", "input_json": "{}"}
    return job_service_pb2.CreateJobRequest(**{**good, **changes})


def call(**changes: Any) -> lifecycle_service_pb2.ModelCall:
    good = {
        "job_id": "j",
        "attempt": 1,
        "call_no": 1,
        "provider": "p",
        "model": "m",
        "tier": "t",
        "credential_mode": "c",
    }
    return lifecycle_service_pb2.ModelCall(**{**good, **changes})


def claim(**changes: Any) -> outbox_service_pb2.ClaimEventsRequest:
    good = {"dispatcher_id": "d", "claim_token": TOKEN, "event_types": ["nothing"], "max_events": 1}
    return outbox_service_pb2.ClaimEventsRequest(**{**good, **changes})


async def refusal(answer: Any) -> AijobsError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return from_rpc_error(raised.value)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (create(input=not_a_number()), "input"),
        (create(input_json="{"), "input_json"),
        (create(input_json='{"a": 1, "a": 2}'), "input_json"),
        (create(input_json="[" * 1000 + "]" * 1000), "input_json"),
        (create(input_json="NaN"), "input_json"),
        (create(user_id="\x00"), "user_id"),
        (create(user_id="é"), "user_id"),
        (create(labels={"a": "x\x00"}), "labels.a"),
        (job_service_pb2.CreateJobRequest(user_id="u", job_type="synthetic"), "input"),
    ],
)
async def test_create(channel: grpc.aio.Channel, request_: job_service_pb2.CreateJobRequest, field: str) -> None:
    error = await refusal(job_service_pb2_grpc.JobServiceStub(channel).CreateJob(request_))
    assert isinstance(error, InvalidInput)
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (job_service_pb2.ListJobsRequest(user_id="é"), "user_id"),
        (job_service_pb2.ListJobsRequest(job_type="x\x00"), "job_type"),
        (job_service_pb2.ListJobsRequest(queue="a b"), "queue"),
        (job_service_pb2.ListJobsRequest(page_size=-1), "page_size"),
        (job_service_pb2.ListJobsRequest(page_token="x"), "page_token"),
        (job_service_pb2.ListJobsRequest(states=[99]), "states"),  # type: ignore[list-item]  # a newer client's
    ],
)
async def test_list(channel: grpc.aio.Channel, request_: job_service_pb2.ListJobsRequest, field: str) -> None:
    error = await refusal(job_service_pb2_grpc.JobServiceStub(channel).ListJobs(request_))
    assert isinstance(error, InvalidInput)
    assert [violation.field for violation in error.violations] == [field]


async def test_the_same_state_many_times_is_the_same_filter(channel: grpc.aio.Channel) -> None:
    states = [1] * 300_000
    answer = await job_service_pb2_grpc.JobServiceStub(channel).ListJobs(
        job_service_pb2.ListJobsRequest(states=states)  # type: ignore[arg-type]  # numbers do
    )
    assert list(answer.jobs) == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (claim(wait=Duration(seconds=-1)), "wait"),
        (claim(wait=Duration(seconds=21)), "wait"),
        (claim(wait=Duration(seconds=2**62)), "wait"),
        (claim(wait=Duration(nanos=2**31 - 1)), "wait"),
        (claim(max_events=-1), "max_events"),
        (claim(max_events=2**31 - 1), "max_events"),
        (claim(event_types=[]), "event_types"),
        (claim(event_types=["x"] * 101), "event_types"),
        (claim(event_types=["é"]), "event_types"),
        (claim(claim_token="short"), "claim_token"),
        (claim(dispatcher_id=""), "dispatcher_id"),
    ],
)
async def test_claim(channel: grpc.aio.Channel, request_: outbox_service_pb2.ClaimEventsRequest, field: str) -> None:
    error = await refusal(outbox_service_pb2_grpc.OutboxServiceStub(channel).ClaimEvents(request_))
    assert isinstance(error, InvalidInput)
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    "settlement",
    [
        {"input_tokens": 2**62},
        {"output_tokens": -1},
        {"latency": Duration(seconds=2**62)},
        {"latency": Duration(seconds=-1)},
        {"latency": Duration(nanos=-1)},
        {"error_code": "x" * 65},
    ],
)
async def test_a_bad_settlement_harms_only_itself(channel: grpc.aio.Channel, settlement: dict[str, Any]) -> None:
    bad = call(settlement=lifecycle_service_pb2.CallSettlement(**settlement))
    answer = await lifecycle_service_pb2_grpc.LifecycleServiceStub(channel).RecordUsage(
        lifecycle_service_pb2.RecordUsageRequest(calls=[bad, call(provider=""), call()])
    )
    assert [result.error.reason for result in answer.results] == ["INVALID_INPUT", "INVALID_INPUT", "JOB_NOT_FOUND"]


async def test_bad_settlements_of_events_harm_only_themselves(channel: grpc.aio.Channel) -> None:
    items = [
        outbox_service_pb2.EventSettlement(event_id="e"),
        outbox_service_pb2.EventSettlement(event_id="", published=outbox_service_pb2.Published()),
        outbox_service_pb2.EventSettlement(event_id="unknown", published=outbox_service_pb2.Published()),
    ]
    answer = await outbox_service_pb2_grpc.OutboxServiceStub(channel).SettleEvents(
        outbox_service_pb2.SettleEventsRequest(claim_token=TOKEN, items=items)
    )
    assert [result.error.reason for result in answer.results] == ["INVALID_INPUT", "INVALID_INPUT", "CLAIM_LOST"]


async def test_more_items_than_fit_are_not_attempted(channel: grpc.aio.Channel) -> None:
    items = [lifecycle_service_pb2.LockRequest(job_id="unknown", lease_token=TOKEN)] * 101
    answer = await lifecycle_service_pb2_grpc.LifecycleServiceStub(channel).LockJobs(
        lifecycle_service_pb2.LockJobsRequest(executor_id="e", items=items)
    )
    assert [result.error.reason for result in answer.results] == ["SESSION_LOST"] * 100 + ["NOT_ATTEMPTED"]


@pytest.mark.parametrize(
    "body", [b"\xff\xff\xff", b"\x12\x02\xc3\x28", b"\x2a" + b"\xff" * 9 + b"\x01"], ids=["broken", "not utf-8", "cut"]
)
async def test_what_cannot_be_decoded_is_a_typed_error(channel: grpc.aio.Channel, body: bytes) -> None:
    as_it_is: Callable[[bytes], bytes] = bytes
    method: Any = channel.unary_unary("/aijobs.v1.JobService/CreateJob", request_serializer=as_it_is)
    error = await refusal(method(body, timeout=5))
    assert isinstance(error, InvalidInput)
    assert [violation.field for violation in error.violations] == ["request"]
