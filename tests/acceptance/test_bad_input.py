"""Everything that people do wrong at the command line: one clear answer each, and nothing written."""

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio

from aijobs.rpc.auth import mint_token
from aijobs.rpc.roles import Role
from deploy.local.ports import free_port
from services.jobs.store.tables import job_snapshots, jobs, outbox_events, requests, users
from tests.acceptance.command import Ended, aijobs
from tests.acceptance.engine import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CREATE = ("jobs", "create", "synthetic", "--user", "u-1")
WRITTEN = (jobs, job_snapshots, outbox_events, requests, users)


class Shop:
    """A backend's shell."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.environment = {
            "AIJOBS_ADDRESS": engine.connections.jobs_address,
            "AIJOBS_TOKEN": engine.token(Role.BACKEND),
        }

    async def aijobs(self, *arguments: str, **environment: str) -> Ended:
        return await aijobs(*arguments, environment=self.environment | environment)

    async def written(self) -> list[int]:
        return [await self.engine.count(table) for table in WRITTEN]


@pytest_asyncio.fixture(loop_scope="module")
async def shop(engine: Engine) -> AsyncIterator[Shop]:
    """A shell in which nothing is ever written."""
    shop = Shop(engine)
    before = await shop.written()
    yield shop
    assert await shop.written() == before


def refused(ended: Ended, status: int, *words: str) -> None:
    """Check that a command said in two lines on stderr what was wrong and what to do, and nothing else."""
    assert (ended.status, ended.out) == (status, ""), ended
    message, advice = ended.err.splitlines()
    assert message.startswith("error: ")
    for word in words:
        assert word in message
    assert advice


async def test_an_unknown_type_is_named_with_those_that_there_are(shop):
    ended = await shop.aijobs("jobs", "create", "no_such_type", "--user", "u-1")
    refused(ended, 2, "no_such_type", "structured_generation", "synthetic")


async def test_input_that_breaks_the_schema_names_the_field(shop):
    refused(await shop.aijobs(*CREATE, "--input", '{"sleep_ms": "long"}'), 2, "input.sleep_ms")
    refused(await shop.aijobs(*CREATE, "--input", '{"sleep_mss": 1}'), 2, "input.sleep_mss")
    nested = {"prompt": "?", "output_schema": {"type": "object"}, "limits": {"max_output_tokens": 0}}
    ended = await shop.aijobs(
        "--json", "jobs", "create", "structured_generation", "--user", "u-1", "--input", json.dumps(nested)
    )
    assert (ended.status, ended.out) == (2, "")
    error = json.loads(ended.err)["error"]
    assert (error["reason"], error["status"]) == ("INVALID_INPUT", "INVALID_ARGUMENT")
    assert [violation["field"] for violation in error["violations"]] == ["input.limits.max_output_tokens"]


async def test_input_that_is_no_json_never_leaves_the_machine(shop):
    refused(await shop.aijobs(*CREATE, "--input", '{"echo": NaN}'), 2, "input", "NaN")
    refused(await shop.aijobs(*CREATE, "--input", "{"), 2, "input", "not JSON")


@pytest.fixture(params=[1, 5], ids=["over our limit", "over gRPC's limit"])
def large_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "large.json"
    file.write_text(json.dumps({"echo": "x" * (request.param * 1024 * 1024)}))
    return file


async def test_too_large_an_input_is_refused_by_size(shop, large_file):
    ended = await shop.aijobs("--json", *CREATE, "--input-file", str(large_file))
    assert (ended.status, ended.out) == (2, "")
    error = json.loads(ended.err)["error"]
    assert error["reason"] == "PAYLOAD_TOO_LARGE"
    assert "1048576" in error["message"] or "4 MiB" in error["message"]


@pytest.mark.parametrize("key", ["with blank", "käse", "x" * 129], ids=["blank", "not ASCII", "too long"])
async def test_a_bad_key_is_refused(shop, key):
    ended = await shop.aijobs("--json", *CREATE, "--key", key)
    assert (ended.status, ended.out) == (2, "")
    error = json.loads(ended.err)["error"]
    assert error["reason"] == "INVALID_IDEMPOTENCY_KEY"
    assert [violation["field"] for violation in error["violations"]] == ["idempotency_key"]


@pytest.mark.parametrize("action", ["get", "watch", "cancel"])
async def test_an_unknown_job_is_not_found(shop, action):
    job_id = str(uuid4())
    refused(await shop.aijobs("jobs", action, job_id), 3, job_id)
    refused(await shop.aijobs("jobs", action, "nonsense"), 3, "nonsense")


async def test_nobody_answers_at_a_wrong_address(shop):
    address = f"127.0.0.1:{free_port()}"
    refused(await shop.aijobs(*CREATE, AIJOBS_ADDRESS=address), 5, address)
    refused(await shop.aijobs(*CREATE, AIJOBS_ADDRESS="nonsense"), 2, "nonsense", "host:port")


async def test_somebody_else_answers_at_a_wrong_address(shop):
    """The dispatcher's address: gRPC, but no jobs."""
    refused(await shop.aijobs(*CREATE, AIJOBS_ADDRESS=shop.engine.dispatcher.address), 4, "does not know this call")


async def test_tokens_that_do_not_hold_are_refused(shop):
    hour = timedelta(hours=1)
    secret = shop.engine.connections.secret
    refused(await shop.aijobs(*CREATE, AIJOBS_TOKEN=""), 4, "authorization")
    refused(await shop.aijobs(*CREATE, AIJOBS_TOKEN="nonsense"), 4, "malformed")
    foreign = mint_token("x" * 32, subject="shop", roles=[Role.BACKEND], lifetime=hour)
    refused(await shop.aijobs(*CREATE, AIJOBS_TOKEN=foreign), 4, "signature")
    expired = mint_token(secret, subject="shop", roles=[Role.BACKEND], lifetime=-hour)
    refused(await shop.aijobs(*CREATE, AIJOBS_TOKEN=expired), 4, "expired")
    user = mint_token(secret, subject="u-1", roles=[Role.USER], lifetime=hour)
    refused(await shop.aijobs(*CREATE, AIJOBS_TOKEN=user), 4, "role backend")
    refused(await shop.aijobs("types"), 4, "role admin")


async def test_a_job_that_fails_is_told_by_the_exit_status(engine):
    shop = Shop(engine)
    failing = json.dumps({"fail_times": 1, "fail_code": "CONTENT_SAFETY_INPUT"})
    ended = await shop.aijobs(*CREATE, "--input", failing, "--watch")
    assert ended.status == 1
    assert "failed: CONTENT_SAFETY_INPUT: The content was refused by the safety check." in ended.out
    ended = await shop.aijobs(*CREATE, "--input", '{"echo": [1, 2]}', "--watch")
    assert (ended.status, ended.err) == (0, "")
    assert "succeeded" in ended.out
