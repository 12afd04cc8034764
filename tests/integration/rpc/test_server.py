"""The server: who gets in, health, reflection, one server a port, how it stops."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from aijobs.errors import AijobsError, PermissionDenied, ShuttingDown, Unauthenticated, Unreachable
from aijobs.rpc.auth import Caller, TokenVerifier, current_caller, mint_token
from aijobs.rpc.channel import open_channel
from aijobs.rpc.roles import Role
from aijobs.rpc.server import CannotListenError, RpcServer
from aijobs.rpc.status import from_rpc_error
from aijobs.v1 import job_service_pb2, job_service_pb2_grpc, outbox_service_pb2, outbox_service_pb2_grpc
from tests.integration.rpc.serving import ScriptedJobs, ScriptedOutbox, rpc_server, serving

SECRET = "0123456789abcdef0123456789abcdef"
HOUR = timedelta(hours=1)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def good_token(*roles: Role, subject: str = "shop") -> str:
    return mint_token(SECRET, subject=subject, roles=roles or (Role.BACKEND,), lifetime=HOUR)


async def refusal(address: str, token: str | None, method: str = "GetJob") -> AijobsError:
    async with open_channel(address, token) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        request = {"GetJob": job_service_pb2.GetJobRequest, "CreateJob": job_service_pb2.CreateJobRequest}[method]()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request)
    return from_rpc_error(caught.value)


async def test_the_handler_sees_who_calls() -> None:
    callers: list[Caller] = []

    async def get(request, context):
        callers.append(current_caller())
        return job_service_pb2.GetJobResponse()

    async def watch(request, context):
        callers.append(current_caller())
        yield job_service_pb2.WatchJobResponse()

    async with (
        serving(ScriptedJobs(get=get, watch=watch), verifier=TokenVerifier(SECRET)) as address,
        open_channel(address, good_token(Role.USER, subject="u-7")) as channel,
    ):
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        await stub.GetJob(job_service_pb2.GetJobRequest())
        await stub.WatchJob(job_service_pb2.WatchJobRequest()).read()
    assert callers == [Caller(subject="u-7", roles=frozenset({Role.USER}))] * 2
    assert not callers[0].may_act_for_anyone


async def test_without_a_secret_everybody_has_every_role() -> None:
    callers: list[Caller] = []

    async def get(request, context):
        callers.append(current_caller())
        return job_service_pb2.GetJobResponse()

    async with serving(ScriptedJobs(get=get)) as address, open_channel(address) as channel:
        await job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest())
    assert callers[0].roles == frozenset(Role)
    assert callers[0].may_act_for_anyone


def bad_tokens() -> dict[str, tuple[str | None, str]]:
    head, body, signature = good_token().split(".")
    long_ago = datetime.now(UTC) - 3 * HOUR
    claims = {"sub": "shop", "roles": ["backend"], "aud": "aijobs", "iat": long_ago, "exp": long_ago + 9 * HOUR}
    return {
        "missing": (None, "exactly one"),
        "garbage": ("garbage", "malformed"),
        "expired": (
            mint_token(SECRET, subject="shop", roles=[Role.BACKEND], lifetime=HOUR, now=long_ago),
            "has expired",
        ),
        "tampered": (f"{head}.{body[:-4]}AAAA.{signature}", "does not hold"),
        "other secret": (mint_token("x" * 32, subject="s", roles=[Role.ADMIN], lifetime=HOUR), "does not hold"),
        "alg none": (jwt.encode(claims, None, algorithm="none"), "not signed with HS256"),
        "other audience": (jwt.encode(claims | {"aud": "else"}, SECRET), "audience"),
        "no expiry": (jwt.encode({k: v for k, v in claims.items() if k != "exp"}, SECRET), "no claim 'exp'"),
        "no roles": (jwt.encode({k: v for k, v in claims.items() if k != "roles"}, SECRET), "no claim 'roles'"),
        "roles no list": (jwt.encode(claims | {"roles": "admin"}, SECRET), "list of texts"),
    }


@pytest.mark.parametrize("case", bad_tokens())
async def test_a_token_that_does_not_hold_is_refused_in_words_that_do_not_repeat_it(case: str) -> None:
    token, why = bad_tokens()[case]
    jobs = ScriptedJobs()
    async with serving(jobs, verifier=TokenVerifier(SECRET)) as address:
        got = await refusal(address, token)
    assert isinstance(got, Unauthenticated)
    assert why in got.message
    assert token is None or token not in got.message
    assert jobs.requests == []


async def test_a_role_that_may_not_call_the_method_is_refused_with_the_roles_that_may() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs, verifier=TokenVerifier(SECRET)) as address:
        got = await refusal(address, good_token(Role.USER), "CreateJob")
        admin = await refusal(address, good_token(Role.ADMIN), "CreateJob")
        executor = await refusal(address, good_token(Role.EXECUTOR), "GetJob")
    assert isinstance(got, PermissionDenied)
    assert got.message == "aijobs.v1.JobService/CreateJob needs the role backend"
    assert isinstance(admin, PermissionDenied)
    assert "admin or backend or user" in executor.message
    assert jobs.requests == []


async def test_a_method_that_the_table_does_not_know_is_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.rpc.roles.METHOD_ROLES", {})
    async with serving() as address:
        assert isinstance(await refusal(address, None), PermissionDenied)


async def test_health_needs_no_token_and_follows_readiness() -> None:
    server = rpc_server(verifier=TokenVerifier(SECRET))
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs know the synchronous one only

        async def check(name: str) -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

        names = ("", "readiness", "aijobs.v1.JobService", "aijobs.v1.JobAdminService")
        assert [await check(name) for name in (*names, "liveness")] == [NOT_SERVING] * 4 + [SERVING]
        await server.set_ready(True)
        assert [await check(name) for name in (*names, "liveness")] == [SERVING] * 5
        await server.set_ready(False)
        assert [await check(name) for name in names] == [NOT_SERVING] * 4
    await server.stop(timedelta(0))


async def test_a_second_server_on_the_port_fails_and_names_the_address() -> None:
    async with serving() as address:
        second = rpc_server(listen=address)
        with pytest.raises(CannotListenError, match=f"cannot listen on {address}: Address already in use"):
            await second.start()


def test_a_server_without_a_verifier_refuses_to_listen_beyond_loopback() -> None:
    with pytest.raises(ValueError, match="AIJOBS_TOKEN_SECRET"):
        RpcServer("0.0.0.0:50051", None)
    RpcServer("0.0.0.0:50051", TokenVerifier(SECRET))


async def test_stopping_ends_streams_and_long_polls_at_once_and_lets_calls_finish() -> None:
    started = asyncio.Queue[str]()
    finish = asyncio.Event()

    async def watch(request, context):
        yield job_service_pb2.WatchJobResponse()
        await asyncio.Event().wait()

    async def get(request, context):
        started.put_nowait("get")
        await finish.wait()
        return job_service_pb2.GetJobResponse()

    async def claim(request, context):
        started.put_nowait("claim")
        await asyncio.Event().wait()

    server = rpc_server(ScriptedJobs(watch=watch, get=get), outbox=ScriptedOutbox(claim))
    port = await server.start()
    await server.set_ready(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
        jobs, outbox = job_service_pb2_grpc.JobServiceStub(channel), outbox_service_pb2_grpc.OutboxServiceStub(channel)
        stream = jobs.WatchJob(job_service_pb2.WatchJobRequest())
        await stream.read()
        running = asyncio.ensure_future(jobs.GetJob(job_service_pb2.GetJobRequest()))
        poll = asyncio.ensure_future(outbox.ClaimEvents(outbox_service_pb2.ClaimEventsRequest()))
        assert {await started.get(), await started.get()} == {"get", "claim"}
        stopping = asyncio.create_task(server.stop(timedelta(seconds=60)))
        for call in (stream.read(), poll):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(from_rpc_error(caught.value), ShuttingDown)
        assert not running.done()
        finish.set()
        assert await running == job_service_pb2.GetJobResponse()
        await stopping
    await server.stop(timedelta(0))  # repeatable


@pytest.fixture
async def silent_address() -> AsyncIterator[str]:
    """Something that accepts connections and never says a word."""
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "connection refused"),
        ("no-such-host.invalid:50051", "its name cannot be resolved"),
        ("silent", "no answer"),
    ],
)
async def test_nobody_at_the_address_is_unreachable_in_bounded_time(
    address: str, why: str, silent_address: str
) -> None:
    address = silent_address if address == "silent" else address
    async with open_channel(address) as channel, asyncio.timeout(15):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await job_service_pb2_grpc.JobServiceStub(channel).GetJob(job_service_pb2.GetJobRequest())
    error = from_rpc_error(caught.value, address=address)
    assert isinstance(error, Unreachable)
    assert error.message == f"the service at {address} cannot be reached: {why}"


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:0", "a b:1", "host:99999", "http://x:1", "[::g]:1"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="bad address"):
        open_channel(address)


def test_a_token_that_cannot_be_sent_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="bad token") as caught:
        open_channel("127.0.0.1:50051", "canary\n")
    assert "canary" not in str(caught.value)


async def test_reflection_knows_the_error_details_so_that_tools_decode_them() -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="google.rpc.ErrorInfo")
    async with serving() as address, open_channel(address) as channel:
        untyped: Any = channel  # the stubs of reflection know the synchronous channel only
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(untyped)
        (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    assert answer.HasField("file_descriptor_response")


async def buf_curl(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("buf")),
        *("curl", "--protocol", "grpc", "--http2-prior-knowledge"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_buf_curl_finds_services_by_reflection_and_calls_them_without_a_schema() -> None:
    async with serving(verifier=TokenVerifier(SECRET)) as address:
        status, services = await buf_curl("--list-services", f"http://{address}")
        assert status == 0, services
        assert {"aijobs.v1.JobService", "aijobs.v1.JobAdminService", "grpc.health.v1.Health"} <= {*services.split()}
        url = f"http://{address}/grpc.health.v1.Health/Check"
        status, answer = await buf_curl("-d", '{"service": "readiness"}', url)
        assert (status, json.loads(answer)) == (0, {"status": "SERVING"})
        status, answer = await buf_curl(
            *("-H", f"authorization: Bearer {good_token()}", "-d", '{"job_id": "x"}'),
            f"http://{address}/aijobs.v1.JobService/GetJob",
        )
        assert status == 0, answer
        assert json.loads(answer)["job"]["jobType"] == "synthetic"
