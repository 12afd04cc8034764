"""The commands for operators, as processes against a real server."""

import json
from collections.abc import Sequence
from datetime import timedelta

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from aijobs.errors import (
    AijobsError,
    ExecutorNotFound,
    InvalidInput,
    JobNotFound,
    JobNotRetryable,
    PermissionDenied,
    PlatformUnavailable,
    RetryInProgress,
    SnapshotExpired,
)
from aijobs.rpc.auth import TokenVerifier, mint_token
from aijobs.rpc.roles import Role
from aijobs.v1 import job_admin_service_pb2 as admin_pb2
from tests.integration.cli.program import Ended, aijobs
from tests.integration.rpc.serving import ScriptedAdmin, ScriptedJobs, a_change, a_job, serving, the_job

JOB = a_job().job_id
NINE = Timestamp(seconds=1_800_003_600)
SECRET = "0123456789abcdef0123456789abcdef"


async def asking(admin: ScriptedAdmin, *arguments: str) -> Ended:
    async with serving(admin=admin) as address:
        return await aijobs(*arguments, AIJOBS_ADDRESS=address)


@pytest.mark.parametrize(
    ("error", "arguments", "status"),
    [
        (JobNotFound("gone"), ("jobs", "retry", "gone"), 3),
        (JobNotRetryable("job j is running"), ("jobs", "retry", "j"), 4),
        (RetryInProgress("job k repeats job j and has not ended"), ("jobs", "retry", "j", "--watch"), 4),
        (SnapshotExpired("the input is no longer stored"), ("jobs", "retry", "j"), 4),
        (ExecutorNotFound("e-9"), ("executors", "drain", "e-9"), 3),
        (PermissionDenied("needs the role admin"), ("executors", "list"), 4),
        (PermissionDenied("needs the role admin"), ("queues", "list"), 4),
        (InvalidInput.field("queue", "no queue 'x'"), ("queues", "pause", "x"), 2),
        (InvalidInput.field("queue", "no queue 'x'"), ("queues", "resume", "x"), 2),
        (PermissionDenied("needs the role admin"), ("platform", "show"), 4),
        (InvalidInput.field("reason", "too long"), ("platform", "off"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_a_refusal_is_two_sentences_and_a_status(
    error: AijobsError, arguments: Sequence[str], status: int
) -> None:
    ended = await asking(ScriptedAdmin(error), *arguments)
    assert ended == Ended(status=status, out="", err=f"error: {error.message}\n{error.advice}\n")


async def test_a_create_while_the_platform_is_off_says_so_at_once() -> None:
    async def create(request, context):
        raise PlatformUnavailable("no jobs can be created: upgrade")

    async with serving(ScriptedJobs(create=create)) as address:
        ended = await aijobs("jobs", "create", "synthetic", "--user", "u-1", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.out) == (5, "")
    assert ended.err == f"error: no jobs can be created: upgrade\n{PlatformUnavailable.advice}\n"


def repeating() -> ScriptedAdmin:
    return ScriptedAdmin(RetryJob=admin_pb2.RetryJobResponse(job=a_job(retry_of="j-0")))


async def test_retry_names_the_new_job_and_the_old_one() -> None:
    admin = repeating()
    ended = await asking(admin, "jobs", "retry", "j-0", "--reason", "the provider was away")
    assert ended == Ended(
        status=0, out=f"created job {JOB}, which repeats j-0\n", err=f"follow it: aijobs jobs watch {JOB}\n"
    )
    (request,) = admin.requests
    assert (request.job_id, request.reason) == ("j-0", "the provider was away")
    assert request.request_id


async def test_a_retry_for_programs_has_the_job_where_a_create_has_it() -> None:
    ended = await asking(repeating(), "jobs", "retry", "j-0", "--json")
    assert (ended.status, ended.err, ended.out.count("\n")) == (0, "", 1)
    job = json.loads(ended.out)["job"]
    assert (job["job_id"], job["retry_of"]) == (JOB, "j-0")


@pytest.mark.parametrize(("kind", "status"), [("succeeded", 0), ("failed", 1)])
async def test_a_watched_retry_shows_the_new_job_from_its_beginning_and_exits_as_it_ends(
    kind: str, status: int
) -> None:
    life = (("retried", "QUEUED"), (kind, kind.upper()))

    async def watch(request, context):
        yield the_job("QUEUED", 1)
        yield a_change(1, life)
        yield a_change(2, life)

    jobs = ScriptedJobs(watch=watch)
    async with serving(jobs, admin=repeating()) as address:
        ended = await aijobs("jobs", "retry", "j-0", "--watch", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.err) == (status, "")
    assert [line.split()[2] for line in ended.out.splitlines()[1:-1]] == ["queued", kind]
    (request,) = jobs.requests
    assert request.job_id == JOB
    assert request.HasField("after_sequence")
    assert request.after_sequence == 0


BUSY = admin_pb2.Executor(
    executor_id="e-1",
    state=admin_pb2.EXECUTOR_STATE_CONNECTED,
    version="0.1.0",
    queues=[
        admin_pb2.ExecutorQueue(queue="ai-background", slots=4, free_slots=3),
        admin_pb2.ExecutorQueue(queue="ai-interactive", slots=2),
    ],
    running=3,
    last_seen_time=NINE,
    drain_time=NINE,
)
GONE = admin_pb2.Executor(executor_id="e-2\x1b[2J", state=admin_pb2.EXECUTOR_STATE_LOST)
STRANGE = admin_pb2.Executor(executor_id="e-3", state=9)  # type: ignore[arg-type]  # a newer server's


async def test_executors_are_listed_with_what_they_do() -> None:
    admin = ScriptedAdmin(ListExecutors=admin_pb2.ListExecutorsResponse(executors=[BUSY, GONE, STRANGE]))
    table = await asking(admin, "executors", "list")
    documents = await asking(admin, "executors", "list", "--json")
    heading, *rows = table.out.splitlines()
    assert heading.split() == ["EXECUTOR", "STATE", "VERSION", "RUNS", "QUEUES", "SEEN"]
    queues = "ai-background 3 of 4 free, ai-interactive 0 of 2 free"
    assert [" ".join(row.split()) for row in rows] == [
        f"e-1 connected, draining 0.1.0 3 {queues} 2027-01-15 09:00:00Z",
        "e-2\\x1b[2J lost 0",
        "e-3 state 9 0",
    ]
    first, second, _ = [json.loads(line) for line in documents.out.splitlines()]
    assert (first["executor_id"], first["state"], first["running"]) == ("e-1", "EXECUTOR_STATE_CONNECTED", 3)
    assert "drain_time" in first
    assert "drain_time" not in second


async def test_no_executors_are_no_error() -> None:
    ended = await asking(ScriptedAdmin(), "executors", "list")
    assert ended == Ended(status=0, out="", err="no executor was seen within the last day\n")


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (BUSY, "executor e-1 takes no more jobs; it still runs 3"),
        (
            admin_pb2.Executor(executor_id="e-1", state=admin_pb2.EXECUTOR_STATE_CONNECTED),
            "executor e-1 takes no more jobs; it runs none",
        ),
        (
            admin_pb2.Executor(executor_id="e-1", state=admin_pb2.EXECUTOR_STATE_DISCONNECTED),
            "executor e-1 is disconnected; should it come back, it takes no jobs",
        ),
    ],
    ids=["busy", "idle", "away"],
)
async def test_drain_says_what_is_left(executor: admin_pb2.Executor, words: str) -> None:
    admin = ScriptedAdmin(DrainExecutor=admin_pb2.DrainExecutorResponse(executor=executor))
    ended = await asking(admin, "executors", "drain", "e-1")
    assert ended == Ended(status=0, out=f"{words}\n", err="")
    assert admin.requests == [admin_pb2.DrainExecutorRequest(executor_id="e-1")]


PAUSED = admin_pb2.QueueInfo(
    queue="ai-background", paused=True, pause_time=NINE, paused_by="caller:kim", reason="upgrade of the models"
)
OPEN = admin_pb2.QueueInfo(queue="ai-interactive")


async def test_queues_are_listed_with_who_paused_them() -> None:
    admin = ScriptedAdmin(ListQueues=admin_pb2.ListQueuesResponse(queues=[PAUSED, OPEN]))
    table = await asking(admin, "queues", "list")
    documents = await asking(admin, "queues", "list", "--json")
    assert [" ".join(row.split()) for row in table.out.splitlines()] == [
        "QUEUE STATE SINCE BY REASON",
        "ai-background paused 2027-01-15 09:00:00Z caller:kim upgrade of the models",
        "ai-interactive open",
    ]
    assert [json.loads(line)["paused"] for line in documents.out.splitlines()] == [True, False]


async def test_a_pause_says_who_paused_the_queue_first_and_why() -> None:
    admin = ScriptedAdmin(PauseQueue=admin_pb2.PauseQueueResponse(queue=PAUSED))
    ended = await asking(admin, "queues", "pause", "ai-background", "--reason", "mine")
    assert ended.status == 0
    assert ended.out == (
        "queue ai-background is paused since 2027-01-15 09:00:00Z by caller:kim: upgrade of the models\n"
    )
    assert admin.requests == [admin_pb2.PauseQueueRequest(queue="ai-background", reason="mine")]


async def test_a_resume_says_that_the_queue_is_open() -> None:
    admin = ScriptedAdmin(ResumeQueue=admin_pb2.ResumeQueueResponse(queue=OPEN))
    ended = await asking(admin, "queues", "resume", "ai-interactive")
    assert ended == Ended(status=0, out="queue ai-interactive is open: its jobs are started\n", err="")
    assert admin.requests == [admin_pb2.ResumeQueueRequest(queue="ai-interactive")]


OFF = admin_pb2.PlatformAvailability(reason="upgrade", changed_by="caller:kim", change_time=NINE)
ON = admin_pb2.PlatformAvailability(available=True, changed_by="caller:kim", change_time=NINE)


@pytest.mark.parametrize(
    ("availability", "words"),
    [
        (admin_pb2.PlatformAvailability(available=True), "jobs can be created"),
        (ON, "jobs can be created; caller:kim switched that on at 2027-01-15 09:00:00Z"),
        (OFF, "no jobs can be created; caller:kim switched that off at 2027-01-15 09:00:00Z: upgrade"),
    ],
    ids=["never switched", "on", "off"],
)
async def test_the_platform_is_shown_as_it_is(availability: admin_pb2.PlatformAvailability, words: str) -> None:
    answer = admin_pb2.GetPlatformAvailabilityResponse(availability=availability)
    ended = await asking(ScriptedAdmin(GetPlatformAvailability=answer), "platform", "show")
    assert ended == Ended(status=0, out=f"{words}\n", err="")


@pytest.mark.parametrize(("word", "availability"), [("on", ON), ("off", OFF)])
async def test_the_platform_is_switched_with_a_reason(word: str, availability: admin_pb2.PlatformAvailability) -> None:
    answer = admin_pb2.SetPlatformAvailabilityResponse(availability=availability)
    admin = ScriptedAdmin(SetPlatformAvailability=answer)
    ended = await asking(admin, "platform", word, "--reason", "because", "--json")
    assert json.loads(ended.out)["available"] is (word == "on")
    assert admin.requests == [admin_pb2.SetPlatformAvailabilityRequest(available=word == "on", reason="because")]


async def test_the_token_of_an_admin_opens_them_and_that_of_a_backend_does_not() -> None:
    async with serving(verifier=TokenVerifier(SECRET)) as address:
        ended = [
            await aijobs("queues", "list", AIJOBS_ADDRESS=address, AIJOBS_TOKEN=token_of(role))
            for role in (Role.ADMIN, Role.BACKEND)
        ]
    assert [each.status for each in ended] == [0, 4]
    assert "needs the role admin" in ended[1].err


def token_of(role: Role) -> str:
    return mint_token(SECRET, subject="kim", roles=[role], lifetime=timedelta(hours=1))
