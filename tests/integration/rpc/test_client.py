"""The client over real gRPC: request ids, repeats, pages, and watches that survive cuts."""

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import grpc
import pytest

from aijobs.client import Client
from aijobs.errors import (
    DeadlineExceeded,
    InvalidInput,
    JobNotFound,
    ShuttingDown,
    Unauthenticated,
    Unavailable,
    Unreachable,
)
from aijobs.rpc.auth import TokenVerifier, mint_token
from aijobs.rpc.channel import open_channel
from aijobs.rpc.roles import Role
from aijobs.states import JobState
from aijobs.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc
from tests.integration.rpc.serving import ScriptedJobs, a_change, a_job, rpc_server, serving, the_job

SECRET = "0123456789abcdef0123456789abcdef"


async def test_create_sends_what_it_was_given_and_a_request_id() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        await client.create(
            "synthetic",
            user_id="u-1",
            input={"n": 1, "word": "é"},
            target=("answer", "a-1"),
            idempotency_key="k",
            strict_idempotency=True,
            labels={"team": "x"},
            priority=0,
        )
        await client.create("synthetic", user_id="u-1", input_json='{"n": 1.0}')
    first, second = jobs.requests
    assert json.loads(first.input_json) == {"n": 1, "word": "é"}
    assert (first.target.type, first.target.id, first.labels["team"]) == ("answer", "a-1", "x")
    assert first.overrides.HasField("priority")
    assert (first.overrides.priority, first.idempotency_key, first.strict_idempotency) == (0, "k", True)
    assert second.input_json == '{"n": 1.0}'
    assert not second.HasField("overrides")
    assert first.request_id
    assert first.request_id != second.request_id


async def test_create_sends_every_override_and_no_other() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        await client.create(
            "synthetic",
            user_id="u-1",
            credential_mode="user_deepseek_key",
            credential_id="c-1",
            prompt_version="2.1.0",
            output_schema_version="3.0.0",
        )
    assert jobs.requests[0].overrides == job_service_pb2.Overrides(
        credential_mode="user_deepseek_key", credential_id="c-1", prompt_version="2.1.0", output_schema_version="3.0.0"
    )


async def test_create_sends_when_the_job_may_start_whatever_its_zone() -> None:
    jobs = ScriptedJobs()
    run_at = datetime(2026, 12, 24, 18, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=2)))
    async with serving(jobs) as address, Client(address) as client:
        await client.create("synthetic", user_id="u-1", run_at=run_at)
        await client.create("synthetic", user_id="u-1")
    later, at_once = jobs.requests
    assert later.run_at.ToDatetime(tzinfo=UTC) == run_at
    assert not at_once.HasField("run_at")


async def test_a_time_without_a_zone_is_refused_before_anything_is_sent() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        with pytest.raises(ValueError, match="run_at: has no time zone"):
            await client.create("synthetic", user_id="u-1", run_at=datetime(2026, 12, 24, 18))  # noqa: DTZ001 - the point
    assert jobs.requests == []


async def test_input_that_is_no_json_is_refused_before_anything_is_sent() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        with pytest.raises(InvalidInput, match="input: is no JSON"):
            await client.create("synthetic", user_id="u-1", input={"n": float("nan")})
    assert jobs.requests == []


@pytest.mark.parametrize("error", [Unavailable("the database is away"), ShuttingDown()])
async def test_a_create_is_repeated_with_the_same_request_id_until_it_is_answered(error: Exception) -> None:
    tries = 0

    async def create(request, context):
        nonlocal tries
        tries += 1
        if tries < 6:  # more than the channel's own four
            raise error
        return job_service_pb2.CreateJobResponse(job=a_job())

    jobs = ScriptedJobs(create=create)
    async with serving(jobs) as address, Client(address) as client:
        answer = await client.create("synthetic", user_id="u-1")
    assert answer.job.job_id == a_job().job_id
    assert len(jobs.requests) == 6
    assert len({request.request_id for request in jobs.requests}) == 1


async def test_a_create_that_is_not_answered_in_time_is_repeated_with_the_same_request_id() -> None:
    """A service that was frozen: the first request may have had its effect, and the repeat finds it."""
    frozen = True

    async def create(request, context):
        nonlocal frozen
        if frozen:
            frozen = False
            await asyncio.Event().wait()
        return job_service_pb2.CreateJobResponse(job=a_job())

    jobs = ScriptedJobs(create=create)
    async with serving(jobs) as address, Client(address, timeout=timedelta(milliseconds=200)) as client:
        await client.create("synthetic", user_id="u-1")
    assert len(jobs.requests) == 2
    assert len({request.request_id for request in jobs.requests}) == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"labels": {"a": 5}}, "labels"),
        ({"priority": "x"}, "priority"),
        ({"credential_mode": 7}, "credential_mode"),
        ({"user_id": 7}, "user_id"),
        ({"run_at": "tomorrow"}, "run_at"),
        ({"run_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))}, "run_at"),  # no such moment in UTC
    ],
)
async def test_a_value_of_a_wrong_type_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        with pytest.raises(InvalidInput) as caught:
            await client.create("synthetic", **{"user_id": "u-1", **wrong})
    assert [violation.field for violation in caught.value.violations] == [field]
    assert jobs.requests == []


async def test_states_may_be_named() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        _ = [job async for job in client.list(states=["succeeded", JobState.FAILED])]
    assert list(jobs.requests[0].states) == [job_pb2.JOB_STATE_SUCCEEDED, job_pb2.JOB_STATE_FAILED]


async def test_a_refusal_is_not_repeated() -> None:
    async def create(request, context):
        raise InvalidInput.field("input.text", "too long")

    jobs = ScriptedJobs(create=create)
    async with serving(jobs) as address, Client(address) as client:
        with pytest.raises(InvalidInput) as caught:
            await client.create("synthetic", user_id="u-1")
    assert [violation.field for violation in caught.value.violations] == ["input.text"]
    assert len(jobs.requests) == 1


async def test_every_call_has_a_deadline() -> None:
    async def get(request, context):
        await asyncio.Event().wait()

    async with (
        serving(ScriptedJobs(get=get)) as address,
        Client(address, timeout=timedelta(milliseconds=100), patience=timedelta(0)) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            await client.get("x")


async def test_the_deadline_of_a_call_reaches_the_server() -> None:
    remaining: list[float | None] = []

    async def get(request, context):
        remaining.append(context.time_remaining())
        return job_service_pb2.GetJobResponse()

    async with serving(ScriptedJobs(get=get)) as address:
        async with Client(address) as client:
            await client.get("x")
        async with open_channel(address) as channel:  # what everybody else uses has one too
            await job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest())
    assert [round(left or 0) for left in remaining] == [10, 10]


async def test_nobody_there_is_unreachable_once_the_patience_is_over() -> None:
    async with Client("127.0.0.1:1", patience=timedelta(seconds=1)) as client, asyncio.timeout(10):
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 cannot be reached: connection refused"):
            await client.get("x")


async def test_a_service_that_comes_up_late_is_found() -> None:
    async with serving() as address:
        pass  # a free port
    async with Client(address) as client, asyncio.timeout(20):
        waiting = asyncio.create_task(client.get("x"))
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        server = rpc_server(listen=address)
        await server.start()
        assert (await waiting).job_id == a_job().job_id
        await server.stop(timedelta(0))


async def test_list_asks_for_pages_as_they_are_needed() -> None:
    async def list_jobs(request, context):
        page = int(request.page_token or 0)
        jobs = [a_job(sequence=page * 2 + n) for n in (1, 2)]
        return job_service_pb2.ListJobsResponse(jobs=jobs, next_page_token=str(page + 1) if page < 2 else "")

    scripted = ScriptedJobs(list_jobs=list_jobs)
    async with serving(scripted) as address, Client(address) as client:
        found = [job.sequence async for job in client.list(user_id="u-1", states=[JobState.FAILED], page_size=2)]
    assert found == [1, 2, 3, 4, 5, 6]
    assert [request.page_token for request in scripted.requests] == ["", "1", "2"]
    assert {(r.user_id, *r.states) for r in scripted.requests} == {("u-1", job_pb2.JOB_STATE_FAILED)}


async def test_cancel_names_job_user_and_reason() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address, Client(address) as client:
        await client.cancel("j", user_id="u-1", reason="changed my mind")
    (request,) = jobs.requests
    assert (request.job_id, request.user_id, request.reason) == ("j", "u-1", "changed my mind")
    assert request.request_id


async def test_the_token_goes_with_unary_calls_and_streams() -> None:
    async def watch(request, context):
        yield the_job("SUCCEEDED", 3)

    token = mint_token(SECRET, subject="shop", roles=[Role.ADMIN], lifetime=timedelta(hours=1))
    async with serving(ScriptedJobs(watch=watch), verifier=TokenVerifier(SECRET)) as address:
        async with Client(address, token) as client:
            assert [kind.job_type for kind in await client.list_job_types()] == ["alpha", "beta"]
            assert [update.job.sequence async for update in client.watch("j")] == [3]
        async with Client(address) as client:
            with pytest.raises(Unauthenticated):
                await client.get("j")
            with pytest.raises(Unauthenticated):
                await anext(client.watch("j"))


def changes(updates: list[job_service_pb2.WatchJobResponse]) -> list[int]:
    return [update.transition.sequence for update in updates]


async def test_a_watch_gives_the_job_then_every_change_and_ends_by_itself() -> None:
    async def watch(request, context):
        yield the_job("QUEUED", 1)
        yield job_service_pb2.WatchJobResponse()  # keep-alive
        yield a_change(2)
        yield a_change(3)
        await asyncio.Event().wait()  # a server that forgets to end the stream

    async with serving(ScriptedJobs(watch=watch)) as address, Client(address) as client, asyncio.timeout(10):
        updates = [update async for update in client.watch("j")]
    assert changes(updates) == [0, 2, 3]
    assert updates[-1].job.state == job_pb2.JOB_STATE_SUCCEEDED


async def test_a_watch_of_a_job_that_has_ended_gives_its_whole_history_on_request() -> None:
    async def watch(request, context):
        yield the_job("SUCCEEDED", 3)
        for sequence in range(request.after_sequence + 1, 4):
            yield a_change(sequence)

    async with serving(ScriptedJobs(watch=watch)) as address, Client(address) as client, asyncio.timeout(10):
        assert changes([update async for update in client.watch("j", after_sequence=0)]) == [0, 1, 2, 3]
        assert changes([update async for update in client.watch("j", after_sequence=3)]) == [0]


@pytest.mark.parametrize("cut", ["unavailable", "draining", "ends early", "cancelled"])
async def test_a_cut_watch_resumes_where_it_was_and_shows_each_change_once(cut: str) -> None:
    streams = 0

    async def watch(request, context):
        nonlocal streams
        streams += 1
        if streams == 1:
            yield the_job("QUEUED", 1)
        else:
            yield the_job("RUNNING", 2)
        if streams > 1:
            yield a_change(2)  # a server that repeats what was seen
        if streams == 2:
            yield a_change(2)
        if streams == 3:
            yield a_change(3)
            return
        match cut:
            case "unavailable":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "max connection age")
            case "draining":
                raise ShuttingDown
            case "cancelled":
                await context.abort(grpc.StatusCode.CANCELLED, "")

    jobs = ScriptedJobs(watch=watch)
    async with serving(jobs) as address, Client(address) as client, asyncio.timeout(10):
        updates = [update async for update in client.watch("j")]
    assert changes(updates) == [0, 2, 3]
    assert [r.after_sequence if r.HasField("after_sequence") else None for r in jobs.requests] == [None, 1, 2]


async def test_a_watch_survives_a_restart_of_the_service() -> None:
    async def before(request, context):
        yield the_job("QUEUED", 1)
        yield a_change(2)
        await asyncio.Event().wait()

    async def after(request, context):
        yield the_job("SUCCEEDED", 3)
        yield a_change(3)

    first = rpc_server(ScriptedJobs(watch=before))
    address = f"127.0.0.1:{await first.start()}"
    second = rpc_server(ScriptedJobs(watch=after), listen=address)
    async with Client(address) as client, asyncio.timeout(20):
        seen: list[job_service_pb2.WatchJobResponse] = []
        async for update in client.watch("j"):
            seen.append(update)
            if update.transition.sequence == 2:
                await first.stop(timedelta(0))
                await second.start()
    assert changes(seen) == [0, 2, 3]
    await second.stop(timedelta(0))


async def test_a_watch_gives_up_when_the_patience_is_over() -> None:
    async def watch(request, context):
        yield the_job("QUEUED", 1)
        await asyncio.Event().wait()

    server = rpc_server(ScriptedJobs(watch=watch))
    address = f"127.0.0.1:{await server.start()}"
    async with Client(address, patience=timedelta(seconds=1)) as client, asyncio.timeout(20):
        updates = client.watch("j")
        await anext(updates)
        await server.stop(timedelta(0))
        with pytest.raises(Unreachable):
            await anext(updates)


async def test_a_silent_stream_counts_as_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.client.watching.LONGEST_SILENCE", timedelta(milliseconds=100))

    async def watch(request, context):
        yield the_job("RUNNING", 2)
        if request.HasField("after_sequence"):
            yield a_change(3)
        await asyncio.Event().wait()

    async with serving(ScriptedJobs(watch=watch)) as address, Client(address) as client, asyncio.timeout(10):
        assert changes([update async for update in client.watch("j")]) == [0, 3]


async def test_a_refused_watch_is_not_repeated() -> None:
    async def watch(request, context):
        if not request.job_id:
            yield the_job("QUEUED", 1)
        raise JobNotFound(request.job_id)

    jobs = ScriptedJobs(watch=watch)
    async with serving(jobs) as address, Client(address) as client:
        with pytest.raises(JobNotFound, match="no job 'gone'"):
            await anext(client.watch("gone"))
    assert len(jobs.requests) == 1


async def test_create_and_wait_returns_the_ended_job_in_full() -> None:
    async def watch(request, context):
        yield the_job("QUEUED", 1)
        yield a_change(2)
        yield a_change(3)

    async def get(request, context):
        assert request.view == job_pb2.JOB_VIEW_FULL
        return job_service_pb2.GetJobResponse(job=a_job("SUCCEEDED", 3, output_json='{"a":1}'))

    async with serving(ScriptedJobs(watch=watch, get=get)) as address, Client(address) as client, asyncio.timeout(10):
        job = await client.create_and_wait("synthetic", user_id="u-1", input={})
    assert (job.state, job.output_json) == (job_pb2.JOB_STATE_SUCCEEDED, '{"a":1}')


async def test_create_and_wait_names_the_job_when_the_wait_is_over() -> None:
    async def watch(request, context):
        yield the_job("QUEUED", 1)
        await asyncio.Event().wait()

    async with serving(ScriptedJobs(watch=watch)) as address, Client(address) as client:
        with pytest.raises(DeadlineExceeded, match=a_job().job_id):
            await client.create_and_wait("synthetic", user_id="u-1", wait=timedelta(milliseconds=200))
