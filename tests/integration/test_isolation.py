"""EX-11: plain functions in threads, handlers in processes of their own, and what a bad one can take along: itself."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import JsonValue
from structlog.testing import capture_logs

from aijobs.client import Client
from aijobs.registry import Registry
from aijobs.v1 import job_pb2
from services.standalone.engine import embedded
from tests.acceptance.waiting import until
from tests.integration.isolated_jobs import DEFINITIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder: Path = tmp_path_factory.mktemp("isolation")
    async with (
        embedded(folder / "jobs.db", asyncio.Event(), registry=Registry(DEFINITIONS)) as address,
        Client(address) as client,
    ):
        yield client


async def ended(client: Client, job_type: str, do: str, **rest: JsonValue) -> tuple[job_pb2.Job, dict[str, Any]]:
    """Run a job to its end and return it with its output."""
    created = await client.create(job_type, user_id="user-1", input={"do": do, **rest})
    async with asyncio.timeout(40):
        async for _ in client.watch(created.job.job_id):
            pass
    job = await client.get(created.job.job_id, full=True)
    return job, json.loads(job.output_json or "{}")


async def kinds(client: Client, job_id: str) -> list[str]:
    return [
        f"{update.transition.kind} {update.transition.reason}".strip()
        async for update in client.watch(job_id, after_sequence=0)
        if update.HasField("transition")
    ]


def children() -> set[int]:
    """Return the processes that are somewhere below this one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def alive(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("job_type", ["isolated", "isolated_blocking"])
async def test_an_isolated_execution_has_a_process_of_its_own_and_none_of_our_settings(
    client: Client, job_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIJOBS_API_KEY", "sk-canary")
    before = children()
    job, found = await ended(client, job_type, "report")
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    assert found["pid"] not in {os.getpid(), *before}
    assert found["environment"] == []
    (artifact,) = job.artifacts
    # The projector, too.
    assert json.loads(artifact.content_json)["pid"] == found["pid"]
    # The run of the harness is the same one there.
    assert (found["run_id"], found["session_id"]) == (f"{job.job_id}.1.1", job.job_id)
    assert 0 < found["seconds_left"] <= 30
    assert not alive(found["pid"])


async def test_a_shared_execution_runs_in_the_executor(client: Client) -> None:
    job, found = await ended(client, "shared", "report")
    assert (found["pid"], found["thread"]) == (os.getpid(), "handlers")
    assert (found["run_id"], found["session_id"]) == (f"{job.job_id}.1.1", job.job_id)


async def test_a_plain_function_runs_in_a_thread_of_its_own(client: Client) -> None:
    _, found = await ended(client, "plain", "report")
    assert (found["pid"], found["thread"]) == (os.getpid(), "handler plain")


@pytest.mark.parametrize("job_type", ["isolated", "isolated_blocking", "plain", "shared"])
async def test_models_answer_wherever_a_handler_runs(client: Client, job_type: str) -> None:
    job, found = await ended(client, job_type, "ask", times=2)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job.error
    assert len(found["said"]) == 2
    assert job.usage.calls == 2


@pytest.mark.parametrize("job_type", ["isolated_frugal", "shared_frugal"])
@pytest.mark.parametrize(("do", "calls"), [("ask", 2), ("tools", 0), ("swallow", 0)])
async def test_a_budget_holds_wherever_a_handler_runs(client: Client, job_type: str, do: str, calls: int) -> None:
    """HA-5, HA-8: the job fails at once, and the call beyond the limit is not made."""
    job, _ = await ended(client, job_type, do, times=3)
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "BUDGET_EXHAUSTED")
    assert job.error.message == "The job reached its usage limit."
    assert await kinds(client, job.job_id) == ["created", "locked", "failed BUDGET_EXHAUSTED"]
    assert job.usage.calls == calls
    if do != "swallow":
        job, _ = await ended(client, job_type, do, times=2)
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED


@pytest.mark.parametrize(
    ("job_type", "do", "code"),
    [
        ("isolated", "exit", "INTERNAL_HANDLER_DIED"),
        ("isolated", "segfault", "INTERNAL_HANDLER_DIED"),
        ("isolated_blocking", "segfault", "INTERNAL_HANDLER_DIED"),
        ("isolated", "babble", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "nonsense", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "lie", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "half", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "flood", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "huge", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "orphan", "INTERNAL_HANDLER_DIED"),
        ("isolated", "close everything", "INTERNAL_HANDLER_DIED"),
        ("isolated", "system exit", "INTERNAL_HANDLER_ERROR"),
        ("isolated_blocking", "system exit", "INTERNAL_HANDLER_ERROR"),
        ("plain", "system exit", "INTERNAL_HANDLER_ERROR"),
        ("plain", "stop iteration", "INTERNAL_HANDLER_ERROR"),
        ("isolated", "raise", "INTERNAL_HANDLER_ERROR"),
        ("plain", "raise", "INTERNAL_HANDLER_ERROR"),
    ],
)
async def test_a_handler_that_dies_costs_nobody_else_anything(
    client: Client, job_type: str, do: str, code: str
) -> None:
    waiting = await client.create("shared", user_id="user-2", input={"do": "progress"})
    job, _ = await ended(client, job_type, do)
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, code)
    # Something of ours may be the reason, so it is tried once more.
    assert await kinds(client, job.job_id) == ["created", "locked", f"execution_failed {code}", f"failed {code}"]
    assert "canary" not in str(job)
    async with asyncio.timeout(20):
        async for _ in client.watch(waiting.job.job_id):
            pass
    other = await client.get(waiting.job.job_id)
    assert (other.state, other.attempt) == (job_pb2.JOB_STATE_SUCCEEDED, 1)


@pytest.mark.parametrize("do", ["hang", "hold the interpreter", "end its own run", "overflow"])
async def test_a_timeout_ends_the_process(client: Client, do: str) -> None:
    """EX-4. Whether or not the code hears of it, and without a word to the executor's other runs."""
    before = children()
    job, _ = await ended(client, "isolated_brief", do)
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "TIMEOUT")
    assert not any(alive(pid) for pid in children() - before)


async def test_a_timeout_goes_on_without_a_thread_that_hangs(client: Client) -> None:
    job, _ = await ended(client, "plain_brief", "hang")
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "TIMEOUT")


async def test_cancelling_ends_a_process_and_what_it_has_started(client: Client) -> None:
    before = children()
    created = await client.create("isolated", user_id="user-1", input={"do": "leave a child"})
    async with asyncio.timeout(20):
        await until(lambda: len({pid for pid in children() - before if alive(pid)}) > 1, "handler and child to run")
        started = children() - before
        await client.cancel(created.job.job_id)
        async for _ in client.watch(created.job.job_id):
            pass
        await until(lambda: not any(alive(pid) for pid in started), "both to end")
    assert (await client.get(created.job.job_id)).state == job_pb2.JOB_STATE_CANCELLED


async def test_progress_and_feedback_pass_between_the_processes(client: Client) -> None:
    created = await client.create("isolated", user_id="user-1", input={"do": "progress"})
    async with asyncio.timeout(20):
        seen = [update.job.progress async for update in client.watch(created.job.job_id, include_progress=True)]
    assert {10, 60} <= set(seen)
    job, found = await ended(client, "isolated", "fail", times=2)
    assert (job.retry_count, found["earlier"]) == (2, ["try 1", "try 2"])


async def test_an_isolated_result_can_call_for_another_job(client: Client) -> None:
    job, _ = await ended(client, "isolated", "talk")
    (follow_up,) = job.follow_up_job_ids
    assert (await client.get(follow_up)).parent_job_id == job.job_id


@pytest.mark.parametrize("job_type", ["isolated", "shared"])
async def test_a_business_row_that_nobody_writes_fails_the_job(client: Client, job_type: str) -> None:
    """The engine of this test has no writers; that the row is refused shows that it arrives."""
    job, _ = await ended(client, job_type, "row")
    assert (job.state, job.error.code) == (job_pb2.JOB_STATE_FAILED, "INTERNAL_RESULT_REFUSED")
    assert job.artifact_count == 0


async def test_a_handler_that_ends_its_own_run_and_hangs_is_stopped_all_the_same(client: Client) -> None:
    """Nothing in the harness would stop it any more: the engine does."""
    created = await client.create("plain", user_id="user-1", input={"do": "end its own run"})
    async with asyncio.timeout(20):
        async for update in client.watch(created.job.job_id, after_sequence=0):
            if update.transition.kind == "locked":
                await client.cancel(created.job.job_id)
    assert (await client.get(created.job.job_id)).state == job_pb2.JOB_STATE_CANCELLED


async def test_a_plain_function_does_not_wait_for_a_coroutine_that_blocks(client: Client) -> None:
    """It has a second; the other one blocks the handlers' loop for five."""
    blocking = await client.create("shared", user_id="user-1", input={"do": "block"})
    job, _ = await ended(client, "plain_brief", "report")
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job.error
    assert (await client.get(blocking.job.job_id)).state == job_pb2.JOB_STATE_RUNNING
    async with asyncio.timeout(20):
        async for _ in client.watch(blocking.job.job_id):
            pass


@pytest.mark.parametrize("job_type", ["isolated", "plain", "shared"])
@pytest.mark.parametrize("do", ["nan", "report"])
async def test_odd_progress_is_no_failure(client: Client, job_type: str, do: str) -> None:
    job, _ = await ended(client, job_type, do)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job.error


async def test_a_copy_that_a_handler_makes_of_its_process_says_nothing_that_counts(client: Client) -> None:
    job, _ = await ended(client, "isolated", "fork")
    assert (job.state, job.retry_count) == (job_pb2.JOB_STATE_SUCCEEDED, 0), job.error
    assert job.artifact_count == 1


async def test_why_an_execution_failed_is_in_the_log(client: Client) -> None:
    with capture_logs() as logs:
        job, _ = await ended(client, "isolated", "segfault")
    told = [entry for entry in logs if entry["event"] == "execution failed"]
    assert [(entry["job_id"], entry["code"]) for entry in told] == [(job.job_id, "INTERNAL_HANDLER_DIED")] * 2
    assert told[0]["why"] == "its process was ended by SIGSEGV"
