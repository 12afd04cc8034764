"""EX-2, EX-3, EX-4, EX-6, case M4: what a provider does, what that makes of a job, and how often the provider is asked.

The real path with the real provider code over real HTTP. Every row says what must be on the wire, what the history and
the ledger must hold, how the job ends, and what its user reads.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aijobs.canonical import JsonObject
from aijobs.client import Client
from aijobs.registry import Registry
from aijobs.testing.model_server import (
    Completion,
    Drip,
    Hang,
    ModelServer,
    RecordedRequest,
    Reply,
    Reset,
    Status,
    truncated,
)
from aijobs.v1 import job_pb2
from aijobs_jobtypes.structured_generation.definition import DEFINITION
from services.standalone.engine import embedded

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, PROMPT = "canary-key", "canary-prompt"
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
GOOD = Completion({"n": 1})
#: One execution, and what may follow it.
TIMEOUT, RETRIES = timedelta(seconds=1), 2
UNAVAILABLE = "The AI model is not available right now. Please try again later."
NOT_ACCEPTED = "The AI model did not accept the request. Please contact support."
BAD_KEY = "The model key is missing, expired or refused."
DID_NOT_FIT = "The answer did not fit what was asked."
UNSAFE = "The content was refused by the safety check."
TOO_LONG = "The job took too long and was stopped."


def definition(job_type: str, **execution: Any) -> Any:
    quick = {"timeout": TIMEOUT, "max_retries": RETRIES, "backoff": timedelta(milliseconds=10)}
    return DEFINITION.model_copy(
        update={
            "job_type": job_type,
            "execution": DEFINITION.execution.model_copy(update={**quick, **execution}),
        }
    )


DEFINITIONS = [
    definition("patient"),
    definition("isolated", isolation="process", timeout=timedelta(seconds=20)),
    definition("once", abort_strategy="fail"),
    # Three of its executions together take longer than all of them may.
    definition("bounded", run_timeout=timedelta(seconds=2.5), backoff=timedelta(milliseconds=300)),
]


class Provider:
    """A model server whose replies are set for each job; the last one is repeated."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.server = ModelServer(self._reply)

    def _reply(self, _: RecordedRequest) -> Reply:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Client, Provider]]:
    provider = Provider()
    folder: Path = tmp_path_factory.mktemp("taxonomy")
    async with provider.server:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AIJOBS_PROVIDER", "openai")
            environment.setenv("AIJOBS_PROVIDER_BASE_URL", provider.server.base_url)
            environment.setenv("AIJOBS_PROVIDER_API_KEY", KEY)
            environment.setenv("AIJOBS_MODEL_PRIMARY", "scripted")
            async with (
                embedded(folder / "jobs.db", asyncio.Event(), registry=Registry(DEFINITIONS)) as address,
                Client(address) as client,
            ):
                yield client, provider


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a job left behind."""

    job: job_pb2.Job
    history: list[str]
    requests: list[RecordedRequest]
    seconds: float


async def run(engine: tuple[Client, Provider], *script: Reply, job_type: str = "patient") -> Seen:
    client, provider = engine
    provider.script = list(script)
    before = len(provider.server.requests)
    started = time.monotonic()
    created = await client.create(job_type, user_id="user-1", input={"prompt": PROMPT, "output_schema": SCHEMA})
    async with asyncio.timeout(30):
        history = [
            f"{update.transition.kind} {update.transition.reason}".strip()
            async for update in client.watch(created.job.job_id, after_sequence=0)
            if update.HasField("transition")
        ]
    seconds = time.monotonic() - started
    job = await client.get(created.job.job_id, full=True)
    shown = f"{job.error} {history}"
    assert KEY not in shown
    assert PROMPT not in shown
    return Seen(job=job, history=history, requests=provider.server.requests[before:], seconds=seconds)


ALWAYS: dict[str, tuple[Callable[[], Reply], str, int, str]] = {
    # what the provider does, always: code, requests on the wire, public text
    "hangs": (Hang, "TIMEOUT", 3, TOO_LONG),
    # Each byte is in time, the answer as a whole is not.
    "drips": (Drip, "TIMEOUT", 3, TOO_LONG),
    "resets": (Reset, "PROVIDER_UNREACHABLE", 3, UNAVAILABLE),
    "breaks off": (
        lambda: Reset(after=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        "PROVIDER_UNREACHABLE",
        3,
        UNAVAILABLE,
    ),
    "answers in HTML": (
        lambda: Status(200, b"<html>", {"Content-Type": "text/html"}),
        "PROVIDER_MALFORMED",
        3,
        UNAVAILABLE,
    ),
    "answers 50 MB": (lambda: Status(200, b" " * (50 * 1024 * 1024)), "PROVIDER_MALFORMED", 3, UNAVAILABLE),
    "answers nothing": (lambda: Completion(""), "PROVIDER_MALFORMED", 3, UNAVAILABLE),
    "is cut off": (lambda: truncated('{"n": 1'), "VALIDATION_TRUNCATED", 3, DID_NOT_FIT),
    "answers in prose": (lambda: Completion("I'd rather not."), "VALIDATION_NOT_JSON", 3, DID_NOT_FIT),
    "answers twice": (lambda: Completion('{"n": 1} {"n": 2}'), "VALIDATION_AMBIGUOUS", 3, DID_NOT_FIT),
    "answers another schema": (lambda: Completion({"n": "one"}), "VALIDATION_SCHEMA", 3, DID_NOT_FIT),
    "answers 2 MiB": (lambda: Completion("x" * 2 * 1024 * 1024), "VALIDATION_TOO_LARGE", 3, DID_NOT_FIT),
    "refuses": (lambda: Completion(None, refusal="no"), "CONTENT_SAFETY_PROVIDER", 1, UNSAFE),
    "filters": (lambda: Completion("x", finish_reason="content_filter"), "CONTENT_SAFETY_PROVIDER", 1, UNSAFE),
    "redirects": (lambda: Status(307, headers={"Location": "/v1/elsewhere"}), "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
    **{
        f"answers {status}": (lambda status=status: Status(status), code, requests, public)  # type: ignore[misc]
        for status, code, requests, public in (
            (400, "PROVIDER_REQUEST_REJECTED", 1, NOT_ACCEPTED),
            (401, "CREDENTIAL_REJECTED", 1, BAD_KEY),
            (403, "CREDENTIAL_REJECTED", 1, BAD_KEY),
            (404, "PROVIDER_REQUEST_REJECTED", 1, NOT_ACCEPTED),
            (408, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
            (409, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
            (422, "PROVIDER_REQUEST_REJECTED", 1, NOT_ACCEPTED),
            (429, "PROVIDER_RATE_LIMITED", 3, UNAVAILABLE),
            (500, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
            (502, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
            (503, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
            (529, "PROVIDER_UNAVAILABLE", 3, UNAVAILABLE),
        )
    },
}


@pytest.mark.parametrize("what", ALWAYS)
async def test_a_provider_that_always(engine: tuple[Client, Provider], what: str) -> None:
    make, code, requests, public = ALWAYS[what]
    seen = await run(engine, make())
    assert (seen.job.state, seen.job.error.code, seen.job.error.message) == (job_pb2.JOB_STATE_FAILED, code, public)
    assert len(seen.requests) == requests
    assert seen.history == ["created", "locked", *[f"execution_failed {code}"] * (requests - 1), f"failed {code}"]
    assert (seen.job.retry_count, seen.job.usage.calls, seen.job.attempt) == (requests, requests, 1)


@pytest.mark.parametrize("what", ALWAYS)
async def test_a_provider_that_does_so_once_costs_one_execution_or_the_job(
    engine: tuple[Client, Provider], what: str
) -> None:
    make, code, requests, _ = ALWAYS[what]
    seen = await run(engine, make(), GOOD)
    if requests == 1:
        assert (seen.job.state, len(seen.requests)) == (job_pb2.JOB_STATE_FAILED, 1)
        return
    assert json.loads(seen.job.output_json) == {"n": 1}
    assert seen.history == ["created", "locked", f"execution_failed {code}", "succeeded"]
    assert (len(seen.requests), seen.job.usage.calls) == (2, 2)
    asked_again = seen.requests[1].body["messages"][0]["content"]
    # What the model can do better, it is told; what the provider did is none of its business.
    assert ("earlier answer" in asked_again.lower()) == code.startswith("VALIDATION_")


async def test_a_timeout_is_tried_again_only_if_the_job_type_says_so(engine: tuple[Client, Provider]) -> None:
    seen = await run(engine, Hang(), job_type="once")
    assert (seen.job.error.code, len(seen.requests)) == ("TIMEOUT", 1)
    # The call in flight was ended, not only the wait for it.
    await engine[1].server.disconnect(len(engine[1].server.requests))


@pytest.mark.parametrize(("status", "job_type"), [(429, "patient"), (503, "patient"), (429, "isolated")])
async def test_retry_after_is_waited_for(engine: tuple[Client, Provider], status: int, job_type: str) -> None:
    seen = await run(engine, Status(status, headers={"Retry-After": "3"}), GOOD, job_type=job_type)
    assert (seen.job.state, len(seen.requests)) == (job_pb2.JOB_STATE_SUCCEEDED, 2)
    assert seen.seconds >= 3


async def test_a_retry_after_beyond_the_time_of_the_run_fails_at_once(engine: tuple[Client, Provider]) -> None:
    seen = await run(engine, Status(429, headers={"Retry-After": "60"}), GOOD, job_type="bounded")
    assert (seen.job.error.code, len(seen.requests)) == ("PROVIDER_RATE_LIMITED", 1)
    assert seen.history == ["created", "locked", "failed PROVIDER_RATE_LIMITED"]


async def test_a_long_retry_after_gives_the_slot_back_meanwhile(engine: tuple[Client, Provider]) -> None:
    """EX-2: a wait longer than 30 s is a hand-back with a not-before time, and its time is the database's."""
    client, provider = engine
    provider.script = [Status(429, headers={"Retry-After": "31"}), GOOD]
    created = await client.create("patient", user_id="user-1", input={"prompt": PROMPT, "output_schema": SCHEMA})
    async with asyncio.timeout(20):
        async for update in client.watch(created.job.job_id, after_sequence=0):
            if update.transition.kind == "handed_back":
                break
    assert update.transition.reason == "retry later"
    job = await client.get(created.job.job_id)
    assert (job.state, job.retry_count, job.takeover_count) == (job_pb2.JOB_STATE_RUNNING, 1, 0)
    await client.cancel(created.job.job_id)


async def test_the_time_of_the_whole_run_ends_the_retries(engine: tuple[Client, Provider]) -> None:
    """EX-4: two executions of 1 s and two waits fit into 2.5 s; the third execution gets what is left, or nothing."""
    seen = await run(engine, Hang(), job_type="bounded")
    assert (seen.job.state, seen.job.error.code) == (job_pb2.JOB_STATE_FAILED, "TIMEOUT")
    assert len(seen.requests) == 2
    assert seen.seconds < 4


async def test_what_is_left_of_a_wait_goes_on_after_the_executor_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EX-2, EX-10: the run is given back, and whoever goes on with it waits for the rest."""
    async with ModelServer(lambda _: Status(429, headers={"Retry-After": "25"})) as server:
        for name, value in (
            ("PROVIDER", "openai"),
            ("PROVIDER_BASE_URL", server.base_url),
            ("MODEL_PRIMARY", "scripted"),
            ("DRAIN_SECONDS", "0"),
        ):
            monkeypatch.setenv(f"AIJOBS_{name}", value)
        database = tmp_path / "jobs.db"
        async with (
            embedded(database, asyncio.Event(), registry=Registry(DEFINITIONS)) as address,
            Client(address) as client,
        ):
            created = await client.create(
                "patient", user_id="user-1", input={"prompt": PROMPT, "output_schema": SCHEMA}
            )
            async with asyncio.timeout(20):
                async for update in client.watch(created.job.job_id, after_sequence=0):
                    if update.transition.kind == "execution_failed":
                        break
    with closing(sqlite3.connect(database)) as connection:
        due_at, handed_back_at = connection.execute(
            "SELECT due_at, (SELECT at FROM job_history WHERE kind = 'handed_back') FROM jobs"
        ).fetchone()
    left = timedelta(microseconds=due_at - handed_back_at)
    assert timedelta(seconds=15) < left <= timedelta(seconds=25)
