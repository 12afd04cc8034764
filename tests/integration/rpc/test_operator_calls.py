"""The client's calls for operators over real gRPC: what they send, and what they give back."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from aijobs.client import Client
from aijobs.errors import ExecutorNotFound, JobNotRetryable, RetryInProgress, SnapshotExpired, Unavailable
from aijobs.v1 import job_admin_service_pb2 as admin_pb2
from tests.integration.rpc.serving import ScriptedAdmin, a_job, serving

EXECUTOR = admin_pb2.Executor(executor_id="e-1", state=admin_pb2.EXECUTOR_STATE_CONNECTED)
QUEUE = admin_pb2.QueueInfo(queue="ai-background", paused=True, reason="upgrade")
DEAD_COUNT = admin_pb2.OutboxEventCount(status=admin_pb2.OUTBOX_EVENT_STATUS_DEAD, count=1)
REQUEUED = admin_pb2.OutboxEventResult(event_id="e-1", outcome=admin_pb2.OUTBOX_EVENT_OUTCOME_REQUEUED)
FOUND = admin_pb2.FindingCount(kind=admin_pb2.FINDING_KIND_EVENT_DEAD, found=2, repaired=1)
AVAILABILITY = admin_pb2.PlatformAvailability(available=True, changed_by="caller:kim")


@pytest.mark.parametrize(
    ("call", "request_sent", "answer", "returned"),
    [
        (
            lambda client: client.retry("j", reason="again", request_id="r-1"),
            admin_pb2.RetryJobRequest(request_id="r-1", job_id="j", reason="again"),
            admin_pb2.RetryJobResponse(job=a_job(retry_of="j")),
            a_job(retry_of="j"),
        ),
        (
            lambda client: client.list_executors(),
            admin_pb2.ListExecutorsRequest(),
            admin_pb2.ListExecutorsResponse(executors=[EXECUTOR]),
            (EXECUTOR,),
        ),
        (
            lambda client: client.drain_executor("e-1"),
            admin_pb2.DrainExecutorRequest(executor_id="e-1"),
            admin_pb2.DrainExecutorResponse(executor=EXECUTOR),
            EXECUTOR,
        ),
        (
            lambda client: client.list_queues(),
            admin_pb2.ListQueuesRequest(),
            admin_pb2.ListQueuesResponse(queues=[QUEUE]),
            (QUEUE,),
        ),
        (
            lambda client: client.pause_queue("ai-background", reason="upgrade"),
            admin_pb2.PauseQueueRequest(queue="ai-background", reason="upgrade"),
            admin_pb2.PauseQueueResponse(queue=QUEUE),
            QUEUE,
        ),
        (
            lambda client: client.resume_queue("ai-background"),
            admin_pb2.ResumeQueueRequest(queue="ai-background"),
            admin_pb2.ResumeQueueResponse(queue=QUEUE),
            QUEUE,
        ),
        (
            lambda client: client.count_outbox_events(),
            admin_pb2.CountOutboxEventsRequest(),
            admin_pb2.CountOutboxEventsResponse(counts=[DEAD_COUNT]),
            admin_pb2.CountOutboxEventsResponse(counts=[DEAD_COUNT]),
        ),
        (
            lambda client: client.requeue_outbox_events(["e-1"], dry_run=True),
            admin_pb2.RequeueOutboxEventsRequest(event_ids=["e-1"], dry_run=True),
            admin_pb2.RequeueOutboxEventsResponse(results=[REQUEUED]),
            (REQUEUED,),
        ),
        (
            lambda client: client.requeue_dead_events(),
            admin_pb2.RequeueOutboxEventsRequest(filter=admin_pb2.DeadEvents()),
            admin_pb2.RequeueOutboxEventsResponse(results=[REQUEUED], more=True),
            admin_pb2.RequeueOutboxEventsResponse(results=[REQUEUED], more=True),
        ),
        (
            lambda client: client.discard_outbox_events(["e-1"]),
            admin_pb2.DiscardOutboxEventsRequest(event_ids=["e-1"]),
            admin_pb2.DiscardOutboxEventsResponse(results=[REQUEUED]),
            (REQUEUED,),
        ),
        (
            lambda client: client.check_consistency(repair=True),
            admin_pb2.CheckConsistencyRequest(repair=True),
            admin_pb2.CheckConsistencyResponse(counts=[FOUND]),
            admin_pb2.CheckConsistencyResponse(counts=[FOUND]),
        ),
        (
            lambda client: client.platform_availability(),
            admin_pb2.GetPlatformAvailabilityRequest(),
            admin_pb2.GetPlatformAvailabilityResponse(availability=AVAILABILITY),
            AVAILABILITY,
        ),
        (
            lambda client: client.set_platform_availability(True, reason="all is well"),
            admin_pb2.SetPlatformAvailabilityRequest(available=True, reason="all is well"),
            admin_pb2.SetPlatformAvailabilityResponse(availability=AVAILABILITY),
            AVAILABILITY,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
async def test_a_call_sends_what_it_was_given_and_returns_what_was_answered(
    call: Callable[[Client], Awaitable[Any]], request_sent: Message, answer: Message, returned: Any
) -> None:
    method = type(answer).__name__.removesuffix("Response")
    admin = ScriptedAdmin(**{method: answer})
    async with serving(admin=admin) as address, Client(address) as client:
        assert await call(client) == returned
    assert admin.requests == [request_sent]


async def test_a_retry_is_repeated_with_the_same_request_id_until_it_is_answered() -> None:
    away = Unavailable("the database is away")
    admin = ScriptedAdmin(*[away] * 5, RetryJob=admin_pb2.RetryJobResponse(job=a_job()))  # more than the channel's four
    async with serving(admin=admin) as address, Client(address) as client:
        assert (await client.retry("j")).job_id == a_job().job_id
        await client.retry("j")
    ids = [request.request_id for request in admin.requests]
    assert len(ids) == 7
    assert len(set(ids[:6])) == 1
    assert ids[0]
    assert ids[6] != ids[0]


@pytest.mark.parametrize("kind", [JobNotRetryable, RetryInProgress, SnapshotExpired])
async def test_a_refused_retry_is_not_repeated(kind: type[JobNotRetryable | RetryInProgress | SnapshotExpired]) -> None:
    admin = ScriptedAdmin(kind("no"))
    async with serving(admin=admin) as address, Client(address) as client:
        with pytest.raises(kind):
            await client.retry("j")
    assert len(admin.requests) == 1


async def test_an_executor_that_is_not_there_is_refused_by_name() -> None:
    async with serving(admin=ScriptedAdmin(ExecutorNotFound("e-9"))) as address, Client(address) as client:
        with pytest.raises(ExecutorNotFound, match="no executor 'e-9'"):
            await client.drain_executor("e-9")


async def test_a_check_may_take_minutes() -> None:
    remaining = []

    class Admin(ScriptedAdmin):
        async def CheckConsistency(self, request, context):  # noqa: N802 - the contract's name
            remaining.append(context.time_remaining())
            return admin_pb2.CheckConsistencyResponse()

    async with serving(admin=Admin()) as address, Client(address) as client:
        await client.check_consistency()
    # Ten minutes. gRPC tells what remains by the host's clock, which may be set a little in the meantime.
    assert 590 < remaining[0] < 610
