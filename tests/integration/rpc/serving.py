"""A real server with scripted handlers, for the tests of everything around the handlers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from google.protobuf.message import Message

from aijobs.rpc.auth import TokenVerifier
from aijobs.rpc.server import RpcServer
from aijobs.v1 import (
    job_admin_service_pb2,
    job_admin_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    outbox_service_pb2,
    outbox_service_pb2_grpc,
)

Handler = Callable[[Any, Any], Awaitable[Any]]


class ScriptedJobs(job_service_pb2_grpc.JobServiceServicer):
    """A JobService whose methods do what a test says; the rest answers with something empty."""

    def __init__(
        self,
        *,
        create: Handler | None = None,
        get: Handler | None = None,
        list_jobs: Handler | None = None,
        cancel: Handler | None = None,
        watch: Callable[[Any, Any], AsyncIterator[Any]] | None = None,
    ):
        self.requests: list[Any] = []
        self._create, self._get, self._list, self._cancel, self._watch = create, get, list_jobs, cancel, watch

    async def _answer(self, handler: Handler | None, request: Any, context: Any, otherwise: Any) -> Any:
        self.requests.append(request)
        return otherwise if handler is None else await handler(request, context)

    async def CreateJob(self, request, context):  # noqa: N802 - the contract's name
        return await self._answer(self._create, request, context, job_service_pb2.CreateJobResponse(job=a_job()))

    async def GetJob(self, request, context):  # noqa: N802 - as above
        return await self._answer(self._get, request, context, job_service_pb2.GetJobResponse(job=a_job()))

    async def ListJobs(self, request, context):  # noqa: N802 - as above
        return await self._answer(self._list, request, context, job_service_pb2.ListJobsResponse())

    async def CancelJob(self, request, context):  # noqa: N802 - as above
        return await self._answer(self._cancel, request, context, job_service_pb2.CancelJobResponse(job=a_job()))

    async def WatchJob(self, request, context):  # noqa: N802 - as above
        self.requests.append(request)
        if self._watch is not None:
            async for message in self._watch(request, context):
                yield message


class ScriptedAdmin(job_admin_service_pb2_grpc.JobAdminServiceServicer):
    """A JobAdminService with two job types; what else it answers with, a test says, by the name of the method.

    Args:
        failures: raised in their order by the next calls, before anything is answered.
        answers: what each method answers; something empty otherwise.

    """

    def __init__(self, *failures: Exception, **answers: Message):
        self.requests: list[Any] = []
        self._failures, self._answers = list(failures), answers

    def _answer(self, method: str, request: Any) -> Any:
        self.requests.append(request)
        if self._failures:
            raise self._failures.pop(0)
        return self._answers.get(method) or getattr(job_admin_service_pb2, f"{method}Response")()

    async def RetryJob(self, request, _context):  # noqa: N802 - as above
        return self._answer("RetryJob", request)

    async def ListExecutors(self, request, _context):  # noqa: N802 - as above
        return self._answer("ListExecutors", request)

    async def DrainExecutor(self, request, _context):  # noqa: N802 - as above
        return self._answer("DrainExecutor", request)

    async def ListQueues(self, request, _context):  # noqa: N802 - as above
        return self._answer("ListQueues", request)

    async def PauseQueue(self, request, _context):  # noqa: N802 - as above
        return self._answer("PauseQueue", request)

    async def ResumeQueue(self, request, _context):  # noqa: N802 - as above
        return self._answer("ResumeQueue", request)

    async def GetPlatformAvailability(self, request, _context):  # noqa: N802 - as above
        return self._answer("GetPlatformAvailability", request)

    async def SetPlatformAvailability(self, request, _context):  # noqa: N802 - as above
        return self._answer("SetPlatformAvailability", request)

    async def ListOutboxEvents(self, request, _context):  # noqa: N802 - as above
        return self._answer("ListOutboxEvents", request)

    async def CountOutboxEvents(self, request, _context):  # noqa: N802 - as above
        return self._answer("CountOutboxEvents", request)

    async def RequeueOutboxEvents(self, request, _context):  # noqa: N802 - as above
        return self._answer("RequeueOutboxEvents", request)

    async def DiscardOutboxEvents(self, request, _context):  # noqa: N802 - as above
        return self._answer("DiscardOutboxEvents", request)

    async def CheckConsistency(self, request, _context):  # noqa: N802 - as above
        return self._answer("CheckConsistency", request)

    async def ListJobTypes(self, _request, _context):  # noqa: N802 - as above
        return job_admin_service_pb2.ListJobTypesResponse(
            job_types=[
                job_admin_service_pb2.JobType(
                    job_type=name,
                    label=name.title(),
                    description=f"Does {name}.",
                    queue="ai-interactive",
                    version="1.0.0",
                    timeout_ms=60_000,
                    input_schema_json='{"type":"object","properties":{"text":{"type":"string"}}}',
                    output_schema_json='{"type":"object"}',
                )
                for name in ("alpha", "beta")
            ]
        )


class ScriptedOutbox(outbox_service_pb2_grpc.OutboxServiceServicer):
    """An OutboxService, for the long poll."""

    def __init__(self, claim: Handler):
        self._claim = claim

    async def ClaimEvents(self, request, context):  # noqa: N802 - as above
        return await self._claim(request, context)

    async def SettleEvents(self, _request, _context):  # noqa: N802 - as above
        return outbox_service_pb2.SettleEventsResponse()


def rpc_server(
    jobs=None, *, admin=None, outbox=None, verifier: TokenVerifier | None = None, listen="127.0.0.1:0"
) -> RpcServer:
    server = RpcServer(listen, verifier)
    server.add(
        "aijobs.v1.JobService",
        job_service_pb2_grpc.add_JobServiceServicer_to_server,
        jobs or ScriptedJobs(),
    )
    server.add(
        "aijobs.v1.JobAdminService",
        job_admin_service_pb2_grpc.add_JobAdminServiceServicer_to_server,
        admin or ScriptedAdmin(),
    )
    if outbox is not None:
        server.add("aijobs.v1.OutboxService", outbox_service_pb2_grpc.add_OutboxServiceServicer_to_server, outbox)
    return server


@asynccontextmanager
async def serving(jobs=None, *, admin=None, outbox=None, verifier: TokenVerifier | None = None) -> AsyncIterator[str]:
    """Serve and give the address."""
    server = rpc_server(jobs, admin=admin, outbox=outbox, verifier=verifier)
    port = await server.start()
    await server.set_ready(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(timedelta(seconds=0))


def a_job(state: str = "QUEUED", sequence: int = 1, **fields: Any) -> job_pb2.Job:
    job = job_pb2.Job(
        job_id="0198c0de-0000-7000-8000-000000000001",
        job_type="synthetic",
        state=job_pb2.JobState.Value(f"JOB_STATE_{state}"),
        user_id="u-1",
        queue="ai-interactive",
        sequence=sequence,
        **fields,
    )
    job.create_time.FromSeconds(1_800_000_000)
    return job


#: A whole life: (kind, state after), numbered from 1.
LIFE = (("created", "QUEUED"), ("locked", "RUNNING"), ("succeeded", "SUCCEEDED"))


def a_change(sequence: int, life: tuple[tuple[str, str], ...] = LIFE) -> job_service_pb2.WatchJobResponse:
    """The watch message about the change with this number."""
    kind, state = life[sequence - 1]
    before = life[sequence - 2][1] if sequence > 1 else "UNSPECIFIED"
    transition = job_pb2.Transition(
        sequence=sequence,
        kind=kind,
        from_state=job_pb2.JobState.Value(f"JOB_STATE_{before}"),
        to_state=job_pb2.JobState.Value(f"JOB_STATE_{state}"),
    )
    transition.time.FromSeconds(1_800_000_000 + sequence)
    return job_service_pb2.WatchJobResponse(job=a_job(state, sequence), transition=transition)


def the_job(state: str, sequence: int, **fields: Any) -> job_service_pb2.WatchJobResponse:
    """The first message of a watch."""
    return job_service_pb2.WatchJobResponse(job=a_job(state, sequence, **fields))
