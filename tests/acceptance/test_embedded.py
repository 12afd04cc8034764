"""The embedded engine as people start it: `aijobs demo` and `aijobs dev`."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aijobs.testing.model_server import Completion, ModelServer
from deploy.local.ports import free_port
from tests.acceptance.command import Ended, Running, aijobs

READY = "aijobs is running"


async def test_demo_shows_the_states_in_order_and_the_json_and_exits_0() -> None:
    ended = await aijobs("demo", environment={})
    assert (ended.status, ended.err) == (0, "")
    shown = re.findall(r"^ +([\d.]+) ms +(\w+) ", ended.out, re.MULTILINE)
    assert [state for _, state in shown] == ["queued", "running", "succeeded"]
    times = [float(time) for time, _ in shown]
    assert times == sorted(times)
    assert "provider offline" in ended.out
    _, _, below = ended.out.partition("validated output")
    output, _ = json.JSONDecoder().raw_decode(below, below.index("{"))
    assert set(output) == {"title", "summary", "key_points", "keywords", "relevance", "reading_minutes"}
    assert output["title"] == "Why remembering beats rereading"


async def test_demo_asks_the_provider_that_the_environment_names_and_fails_with_it() -> None:
    async with ModelServer([Completion({"title": "too little"}), Completion({"title": "still"})]) as server:
        environment = {
            "AIJOBS_PROVIDER": "openai",
            "AIJOBS_PROVIDER_BASE_URL": server.base_url,
            "AIJOBS_MODEL_PRIMARY": "m",
        }
        ended = await aijobs("demo", environment=environment)
        assert len(server.requests) == 2
    assert ended.status == 1
    assert "VALIDATION_SCHEMA" in ended.out


async def test_demo_outside_of_a_clone_says_where_it_belongs(tmp_path: Path) -> None:
    ended = await aijobs("demo", environment={}, folder=tmp_path)
    assert ended.status == 2
    assert "run it in the folder of a clone" in ended.out.replace("\n", " ")


@asynccontextmanager
async def dev(folder: Path, address: str, **environment: str) -> AsyncIterator[Running]:
    """Run `aijobs dev` in a folder; it is killed if the block does not end it."""
    running = await Running.start(
        "-m", "services.cli", "dev", environment={"AIJOBS_LISTEN": address} | environment, folder=folder
    )
    try:
        yield running
    finally:
        await running.end()


async def stop(running: Running) -> Ended:
    running.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(15):
        return await running.ended()


async def test_dev_serves_the_command_line_stops_on_sigterm_and_keeps_its_jobs(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = {"AIJOBS_ADDRESS": address}
    create = ("jobs", "create", "synthetic", "--user", "me")
    # No slots: what is created waits.
    async with dev(tmp_path, address, AIJOBS_SLOTS_INTERACTIVE="0") as first:
        said = await first.until("buf curl")
        assert READY in said
        assert address in said
        waiting = await aijobs("--json", *create, "--input", '{"echo": "waited"}', environment=environment)
        assert waiting.status == 0
        job_id = json.loads(waiting.out)["job"]["job_id"]
        stopped = await stop(first)
        assert (stopped.status, stopped.err) == (0, "")

    async with dev(tmp_path, address) as second:
        await second.until("buf curl")
        watched = await aijobs("jobs", "watch", job_id, "--from", "0", environment=environment)
        assert (watched.status, watched.err) == (0, "")
        assert re.findall(r"^ +[\d.]+ s +(\w+) ", watched.out, re.MULTILINE)[-3:] == ["queued", "running", "succeeded"]
        output = await aijobs("jobs", "get", job_id, "--output", environment=environment)
        assert json.loads(output.out)["echo"] == "waited"

        created = await aijobs(*create, "--watch", environment=environment)
        assert (created.status, created.err) == (0, "")
        listed = await aijobs("--json", "jobs", "list", environment=environment)
        assert [json.loads(line)["state"] for line in listed.out.splitlines()] == ["JOB_STATE_SUCCEEDED"] * 2

        # Somebody starts it once more.
        async with dev(tmp_path, address) as third:
            refused = await third.ended()
        assert (refused.status, refused.out) == (2, "")
        assert refused.err == f"aijobs dev cannot start: cannot listen on {address}: Address already in use\n"

        running = await aijobs("--json", *create, "--input", '{"sleep_ms": 700}', environment=environment)
        stopped = await stop(second)
        assert (stopped.status, stopped.err) == (0, "")

    # The run that was in hand was finished before the engine ended.
    async with dev(tmp_path, address, AIJOBS_SLOTS_INTERACTIVE="0") as fourth:
        await fourth.until("buf curl")
        job_id = json.loads(running.out)["job"]["job_id"]
        got = await aijobs("--json", "jobs", "get", job_id, environment=environment)
        assert json.loads(got.out)["state"] == "JOB_STATE_SUCCEEDED"


async def test_dev_names_bad_settings_by_their_variables(tmp_path: Path) -> None:
    async with dev(tmp_path, "127.0.0.1:0", AIJOBS_SLOTS_BACKGROUND="many") as running:
        ended = await running.ended()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("aijobs dev cannot start: AIJOBS_SLOTS_BACKGROUND: Input should be a valid integer")
    async with dev(tmp_path, "0.0.0.0:0") as running:
        ended = await running.ended()
    assert ended.status == 2
    assert "can be reached from other machines" in ended.err
