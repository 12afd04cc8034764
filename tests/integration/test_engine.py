"""EX-1, EX-2, EX-4, EX-5, PJ-1, PJ-2: the engine with handlers that misbehave, over the embedded engine's real path."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import JsonValue, SecretStr

from aijobs.broker.memory import MemoryBroker
from aijobs.broker.port import Message
from aijobs.client import Client
from aijobs.registry import Registry
from aijobs.v1 import job_pb2
from services.executor import app as executor_app
from services.executor import consumer as consumer_module
from services.executor.settings import ExecutorSettings
from services.jobs import app as jobs_app
from services.jobs.migrate import upgrade_with
from services.jobs.settings import JobsSettings
from services.standalone.engine import ANY_PORT, NO_BROKER, Service, embedded, start
from tests.integration.odd_jobs import DEFINITIONS, SECRET, SPENT, definition


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder: Path = tmp_path_factory.mktemp("engine")
    async with (
        embedded(folder / "jobs.db", asyncio.Event(), registry=Registry(DEFINITIONS)) as address,
        Client(address) as client,
    ):
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ended(client: Client, do: str, job_type: str = "odd", **rest: JsonValue) -> tuple[job_pb2.Job, Sequence[str]]:
    """Run a job to its end and return it with the reasons in its history."""
    created = await client.create(job_type, user_id="user-1", input={"do": do, **rest})
    async with asyncio.timeout(30):
        reasons = [
            f"{update.transition.kind} {update.transition.reason}".strip()
            async for update in client.watch(created.job.job_id, after_sequence=0)
            if update.HasField("transition")
        ]
    return await client.get(created.job.job_id, full=True), reasons


async def test_an_output_is_stored_as_canonical_json_with_its_hash(client: Client) -> None:
    job, kinds = await ended(client, "return_ok", "odd_projected")
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    assert job.output_json == '{"numbers":[1],"value":{"a":2,"b":1}}'
    assert job.output_hash == hashlib.sha256(job.output_json.encode()).hexdigest()
    assert [(a.type, a.ordinal, a.content_json) for a in job.artifacts] == [
        ("odd", 0, '{"a":2,"b":1}'),
        ("odd", 1, '{"a":2,"b":1}'),
    ]
    assert kinds == ["created", "locked", "succeeded"]


async def test_a_handler_may_return_a_model(client: Client) -> None:
    job, _ = await ended(client, "model")
    assert json.loads(job.output_json) == {"numbers": [3, 1], "value": "from a model"}


@pytest.mark.parametrize(
    "do",
    [
        "return_nothing",
        "return_text",
        "return_extra_key",
        "return_wrong_type",
        "return_nan",
        "return_set",
        "return_key_that_is_no_text",
        "model_with_nan",
        "return_infinity",
        "return_large_integer",
        "return_large_float",
        "return_surrogate",
        "return_nul",
    ],
)
async def test_an_output_that_cannot_be_stored_is_tried_again_then_fails(client: Client, do: str) -> None:
    job, kinds = await ended(client, do)
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "VALIDATION_OUTPUT")
    assert job.error.message == "The answer did not fit what was asked."
    assert kinds == ["created", "locked", *["execution_failed VALIDATION_OUTPUT"] * 2, "failed VALIDATION_OUTPUT"]
    assert job.retry_count == 3


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ("raise", "INTERNAL_HANDLER_ERROR"),
        ("timeout_error", "INTERNAL_HANDLER_ERROR"),
        ("return_object_that_is_no_json", "VALIDATION_OUTPUT"),
        ("return_too_much", "INTERNAL_RESULT_TOO_LARGE"),
        ("unheard_of", "INTERNAL_HANDLER_ERROR"),
        ("cancels_itself", "INTERNAL_HANDLER_ERROR"),
        ("generator_exit", "INTERNAL_HANDLER_ERROR"),
        ("bad_code", "INTERNAL_HANDLER_ERROR"),
        ("surrogates", "CREDENTIAL_ODD"),
    ],
)
async def test_a_broken_handler_fails_the_job_and_leaks_nothing(client: Client, do: str, code: str) -> None:
    job, kinds = await ended(client, do)
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, code)
    assert SECRET not in job.error.message
    assert len(kinds) <= 5


async def test_a_broken_projector_fails_the_job_and_leaves_no_artifact(client: Client) -> None:
    job, kinds = await ended(client, "model", "odd_projected")
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "INTERNAL_PROJECTOR_ERROR")
    assert (job.artifact_count, list(job.artifacts), job.output_json) == (0, [], "")
    assert kinds == [
        "created",
        "locked",
        "execution_failed INTERNAL_PROJECTOR_ERROR",
        "failed INTERNAL_PROJECTOR_ERROR",
    ]


@pytest.mark.parametrize("do", ["return_bad_ordinal", "return_bad_type"])
async def test_an_artifact_that_cannot_be_stored_is_the_projectors_failure(client: Client, do: str) -> None:
    job, _ = await ended(client, do, "odd_projected")
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "INTERNAL_PROJECTOR_ERROR")


async def test_the_timeout_bounds_the_projector_too(client: Client) -> None:
    """EX-4. It blocks the handlers' loop; nobody else's lease suffers, and the job does not run for ever."""
    job, _ = await ended(client, "return_endless", "odd_brief_projected")
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "TIMEOUT")


async def test_progress_may_be_any_number(client: Client) -> None:
    job, _ = await ended(client, "float_progress")
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED


async def test_a_handler_that_outlives_its_run_spends_nothing_more(client: Client) -> None:
    SPENT.clear()
    created = await client.create("odd", user_id="user-1", input={"do": "spend_on"})
    async with asyncio.timeout(20):
        async for update in client.watch(created.job.job_id, after_sequence=0):
            if update.transition.kind == "locked":
                await client.cancel(created.job.job_id)
    assert SPENT == ["RunOver"]
    assert (await client.get(created.job.job_id)).usage.calls == 0


async def test_feedback_of_failed_executions_reaches_the_next_one(client: Client) -> None:
    job, _ = await ended(client, "fail", times=2)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    assert json.loads(job.output_json)["value"] == ["try 1", "try 2"]
    assert (job.attempt, job.retry_count) == (1, 2)


@pytest.mark.parametrize(
    ("job_type", "kinds"),
    [
        ("odd_brief", ["created", "locked", "execution_failed TIMEOUT", "failed TIMEOUT"]),
        ("odd_brief_once", ["created", "locked", "failed TIMEOUT"]),
    ],
)
async def test_a_timeout_follows_the_abort_strategy(client: Client, job_type: str, kinds: list[str]) -> None:
    job, seen = await ended(client, "hang", job_type)
    assert (job.error.code, job.error.message) == ("TIMEOUT", "The job took too long and was stopped.")
    assert seen == kinds


async def test_a_run_whose_next_execution_might_be_too_long_for_its_message_is_given_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ruling 17: the broker would take the message away from it. It goes on at once, and only the failure counts."""
    monkeypatch.setattr(consumer_module, "LONGEST_HELD", timedelta(seconds=6))
    job, kinds = await ended(client, "fail_slowly", "odd_slow", times=1)
    assert kinds == [
        *("created", "locked", "execution_failed VALIDATION_SCHEMA", "handed_back retry later"),
        *("taken_over", "succeeded"),
    ]
    assert (job.attempt, job.retry_count, job.takeover_count) == (2, 1, 0)


async def test_a_message_that_was_held_for_too_long_starts_no_execution(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "LONGEST_HELD", timedelta(seconds=29))  # less than an execution may take
    created = await client.create("odd", user_id="user-1", input={"do": "return_deep"})
    kinds = []
    async with asyncio.timeout(20):
        async for update in client.watch(created.job.job_id, after_sequence=0):
            if update.HasField("transition"):
                kinds.append(f"{update.transition.kind} {update.transition.reason}".strip())
            if update.transition.kind == "handed_back":
                monkeypatch.undo()
    assert kinds[:3] == ["created", "locked", "handed_back message held for too long"]
    assert kinds[-2:] == ["taken_over", "succeeded"]
    job = await client.get(created.job.job_id)
    assert (job.retry_count, job.takeover_count) == (0, 0)


async def test_cancelling_ends_a_hanging_handler(client: Client) -> None:
    created = await client.create("odd", user_id="user-1", input={"do": "hang"})
    kinds = []
    async with asyncio.timeout(20):
        async for update in client.watch(created.job.job_id, after_sequence=0):
            if not update.HasField("transition"):
                continue
            kinds.append(update.transition.kind)
            if update.transition.kind == "locked":
                await client.cancel(created.job.job_id)
    assert kinds == ["created", "locked", "cancel_requested", "cancelled"]


async def test_progress_reaches_watchers_within_its_bounds(client: Client) -> None:
    created = await client.create("odd", user_id="user-1", input={"do": "progress"})
    async with asyncio.timeout(20):
        seen = [update.job.progress async for update in client.watch(created.job.job_id, include_progress=True)]
    assert seen == sorted(seen)
    assert {10, 60} <= set(seen) <= {0, 10, 60, 100}


async def test_a_hanging_job_does_not_hold_up_another_one(client: Client) -> None:
    hanging = await client.create("odd", user_id="user-1", input={"do": "hang"})
    job, _ = await ended(client, "return_deep")
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    await client.cancel(hanging.job.job_id)


async def test_a_job_of_a_type_that_the_executor_does_not_know_waits_for_another_one(tmp_path: Path) -> None:
    """Case L9. The job's own type is the one that counts, whatever the message names."""
    known, unknown = definition("odd"), definition("odd_unknown")
    broker = MemoryBroker()
    database = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    await upgrade_with(database)
    async with AsyncExitStack() as stack:
        stop = asyncio.Event()
        jobs = jobs_app.build(
            JobsSettings(listen=ANY_PORT, database_url=SecretStr(database)), Registry([known, unknown])
        )
        address = f"127.0.0.1:{await start(stack, stop, Service('jobs', jobs.run))}"
        settings = ExecutorSettings(listen=ANY_PORT, address=address, broker_url=NO_BROKER)
        executor = executor_app.build(settings, Registry([known]), broker)
        await start(stack, stop, Service("executor", executor.run))
        client = await stack.enter_async_context(Client(address))
        job_id = (await client.create("odd_unknown", user_id="user-1", input={"do": "hang"})).job.job_id
        body = json.dumps({"jobId": job_id, "jobType": "odd"}).encode()
        publisher = broker.publisher()
        await publisher.publish(
            Message(queue="ai-interactive", topic="", message_id="m", correlation_id=job_id, body=body),
            timedelta(seconds=5),
        )
        kinds = []
        async with asyncio.timeout(20), aclosing(client.watch(job_id, after_sequence=0)) as updates:
            async for update in updates:
                kinds.append(update.transition.kind)
                if update.transition.kind == "dispatched_again":
                    break
        assert (await client.get(job_id)).state == job_pb2.JOB_STATE_QUEUED
        assert kinds[1:] == ["created", "dispatched_again"]


async def test_how_often_a_queue_tries_again_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QU-1, for job types that leave it to their queue."""
    monkeypatch.setenv("AIJOBS_INTERACTIVE_ATTEMPTS", "3")
    monkeypatch.setenv("AIJOBS_INTERACTIVE_BACKOFF_SECONDS", "0.01")
    silent = definition("odd_silent", max_retries=None, backoff=None)
    async with (
        embedded(tmp_path / "jobs.db", asyncio.Event(), registry=Registry([silent])) as address,
        Client(address) as client,
    ):
        job, kinds = await ended(client, "fail", "odd_silent")
        assert (job.state, job.max_retries, job.retry_count) == (job_pb2.JOB_STATE_FAILED, 2, 3)
        assert kinds[2:] == [*["execution_failed VALIDATION_SCHEMA"] * 2, "failed VALIDATION_SCHEMA"]
