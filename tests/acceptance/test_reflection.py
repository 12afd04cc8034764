"""A tool that knows nothing of us but an address finds its way: reflection and health on all three servers."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from google.rpc.error_details_pb2 import ErrorInfo  # type: ignore[import-untyped]  # it has no py.typed

from aijobs.rpc.roles import METHOD_ROLES, Role
from tests.acceptance.engine import USER, Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUF = str(Path(sys.executable).with_name("buf"))
TOOLS = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
OURS = {method.partition("/")[0] for method in METHOD_ROLES}
EVERYWHERE = {"jobs": OURS | TOOLS, "dispatcher": TOOLS, "executor": TOOLS}


async def buf_curl(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def address(engine: Engine, name: str) -> str:
    return f"http://{getattr(engine, name).address}"


@pytest.mark.parametrize("name", EVERYWHERE)
async def test_services_methods_and_health_of_each_server(engine, name):
    url = address(engine, name)
    status, out, err = await buf_curl("--list-services", url)
    assert (status, err) == (0, "")
    assert set(out.split()) == EVERYWHERE[name]

    status, out, err = await buf_curl("--list-methods", url)
    assert (status, err) == (0, "")
    listed = set(out.split())
    assert {method for method in listed if method.startswith("aijobs.")} == (
        set(METHOD_ROLES) if name == "jobs" else set()
    )
    assert {"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"} <= listed

    for part in ("", "readiness", "liveness"):
        status, out, err = await buf_curl("-d", json.dumps({"service": part}), f"{url}/grpc.health.v1.Health/Check")
        assert (status, err) == (0, "")
        assert json.loads(out) == {"status": "SERVING"}


async def test_a_job_is_created_and_read_with_a_token_and_without_any_schema_of_ours(engine):
    url = f"{address(engine, 'jobs')}/aijobs.v1.JobService"
    header = ("-H", f"Authorization: Bearer {engine.token(Role.BACKEND)}")
    wanted = {"request_id": str(uuid4()), "user_id": USER, "job_type": "synthetic", "input": {"echo": "hello"}}
    status, out, err = await buf_curl(*header, "-d", json.dumps(wanted), f"{url}/CreateJob")
    assert (status, err) == (0, "")
    job_id = json.loads(out)["job"]["jobId"]
    await engine.ended(job_id)
    full = json.dumps({"job_id": job_id, "view": "JOB_VIEW_FULL"})
    status, out, err = await buf_curl(*header, "-d", full, f"{url}/GetJob")
    assert (status, err) == (0, "")
    job = json.loads(out)["job"]
    assert (job["state"], job["userId"]) == ("JOB_STATE_SUCCEEDED", USER)
    assert json.loads(job["outputJson"])["echo"] == "hello"


def reason_of(error: dict[str, Any]) -> tuple[str, str]:
    """Decode the one ErrorInfo of an error; buf prints the details of gRPC errors as they came, unpadded base64."""
    (value,) = [detail["value"] for detail in error["details"] if detail["type"] == "google.rpc.ErrorInfo"]
    info = ErrorInfo.FromString(base64.b64decode(value + "=" * (-len(value) % 4)))
    return info.domain, info.reason


async def test_an_error_shows_its_reason(engine):
    url = f"{address(engine, 'jobs')}/aijobs.v1.JobService/GetJob"
    unknown = json.dumps({"job_id": str(uuid4())})
    status, out, err = await buf_curl("-H", f"Authorization: Bearer {engine.token(Role.BACKEND)}", "-d", unknown, url)
    assert (status != 0, out) == (True, "")
    assert json.loads(err)["code"] == "not_found"
    assert reason_of(json.loads(err)) == ("aijobs", "JOB_NOT_FOUND")

    status, out, err = await buf_curl("-d", unknown, url)
    assert (status != 0, out) == (True, "")
    assert json.loads(err)["code"] == "unauthenticated"
    assert reason_of(json.loads(err)) == ("aijobs", "UNAUTHENTICATED")
