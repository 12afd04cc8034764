"""The jobs service alone, as a real process on a real database: for tests that need no broker and run no job."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import grpc

from aijobs import canonical
from aijobs.rpc.channel import open_channel
from aijobs.rpc.roles import Role
from aijobs.v1 import (
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    lifecycle_service_pb2,
    lifecycle_service_pb2_grpc,
    outbox_service_pb2,
    outbox_service_pb2_grpc,
)
from deploy.local.processes import ServiceProcess
from tests.acceptance.engine import USER, Engine, lines_with


@asynccontextmanager
async def jobs_alone(
    folder: Path, database_url: str, *, direct_database_url: str | None = None, **environment: str
) -> AsyncIterator[Engine]:
    """Run an engine without dispatcher and executor on an empty database."""
    engine = Engine(
        folder,
        database_url=database_url,
        direct_database_url=direct_database_url,
        broker_url="amqp://nobody",
        # Who calls it as a dispatcher here gives no other signs of life.
        environment={"AIJOBS_DISPATCHER_GRACE_SECONDS": "600", **environment},
    )
    try:
        await engine.migrate()
        await engine.jobs.start()
        yield engine
    finally:
        await engine.end()


class Stubs:
    """The methods of a jobs service, for a caller who may do everything, and who is an executor in a session."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.jobs = job_service_pb2_grpc.JobServiceStub(channel)
        self.lifecycle = lifecycle_service_pb2_grpc.LifecycleServiceStub(channel)
        self.outbox = outbox_service_pb2_grpc.OutboxServiceStub(channel)
        self._executor_id = uuid4().hex
        self._epoch = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Be an executor that is there."""
        hello = lifecycle_service_pb2.SessionHello(executor_id=self._executor_id, hello_no=1, job_types=["synthetic"])
        stream = self.lifecycle.OpenSession()
        await stream.write(lifecycle_service_pb2.OpenSessionRequest(hello=hello))
        first = await stream.read()
        assert isinstance(first, lifecycle_service_pb2.OpenSessionResponse)
        self._epoch = first.welcome.epoch
        try:
            yield
        finally:
            stream.cancel()

    async def create(self, user_id: str = USER) -> job_pb2.Job:
        return (await self.jobs.CreateJob(a_create(user_id))).job

    async def lock(self, job_id: str, token: str = "") -> lifecycle_service_pb2.LockedJob:
        item = lifecycle_service_pb2.LockRequest(job_id=job_id, lease_token=token or uuid4().hex)
        answer = await self.lifecycle.LockJobs(
            lifecycle_service_pb2.LockJobsRequest(
                executor_id=self._executor_id, session_epoch=self._epoch, items=[item]
            )
        )
        return answer.results[0].locked

    async def running(self) -> lifecycle_service_pb2.LockedJob:
        return await self.lock((await self.create()).job_id)

    async def submit(self, outcome: lifecycle_service_pb2.Outcome) -> lifecycle_service_pb2.OutcomeAccepted:
        answer = await self.lifecycle.SubmitOutcomes(
            lifecycle_service_pb2.SubmitOutcomesRequest(executor_id=self._executor_id, items=[outcome])
        )
        assert answer.results[0].HasField("accepted"), answer
        return answer.results[0].accepted

    async def claim(self, token: str = "") -> list[outbox_service_pb2.OutboxEvent]:
        answer = await self.outbox.ClaimEvents(
            outbox_service_pb2.ClaimEventsRequest(
                dispatcher_id="dispatcher-1",
                claim_token=token or uuid4().hex,
                event_types=["ai.job.enqueue", "ai.job.completed", "ai.job.cancelled"],
                max_events=10,
            )
        )
        return list(answer.events)


def a_create(user_id: str) -> job_service_pb2.CreateJobRequest:
    return job_service_pb2.CreateJobRequest(
        request_id=uuid4().hex, user_id=user_id, job_type="synthetic", input_json="{}"
    )


def a_success(lease: lifecycle_service_pb2.Lease, says: str = "done") -> lifecycle_service_pb2.Outcome:
    output = canonical.dump({"says": says})
    artifacts = [job_pb2.Artifact(type="note", id=f"a{n}", ordinal=n, content_json=output) for n in range(2)]
    return lifecycle_service_pb2.Outcome(
        lease=lease,
        succeeded=lifecycle_service_pb2.Succeeded(
            output_json=output,
            output_hash=canonical.digest(output),
            projection=lifecycle_service_pb2.Projection(artifacts=artifacts),
        ),
    )


@asynccontextmanager
async def calling(engine: Engine) -> AsyncIterator[Stubs]:
    token = engine.token(Role.BACKEND, Role.EXECUTOR, Role.DISPATCHER)
    async with open_channel(engine.jobs.address, token) as channel:
        stubs = Stubs(channel)
        async with stubs.session():
            yield stubs


def answers_logged(process: ServiceProcess, method: str) -> list[str]:
    """Return the codes with which a service answered the calls of a method; the channel may have repeated some."""
    lines = [json.loads(line) for line in lines_with(process.log, f"/{method}")]
    return [line["code"] for line in lines if line["event"] == "call"]
