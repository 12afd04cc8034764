"""The life of a service process, shown by real processes and signals."""

import asyncio
import json
import signal
import sys

import pytest

SERVICE = """
import asyncio, sys
from aijobs import logs
from aijobs.service import CannotRun, background, run_service

class Loop:
    name = "relay"
    async def run(self):
        if {broken!r} == "raises":
            raise RuntimeError("lost")
        if {broken!r} == "loop cannot run":
            raise CannotRun("the queue is made of cheese; bake another")
        if {broken!r} == "returns":
            return
        try:
            await asyncio.Event().wait()
        finally:
            print("loop ended", flush=True)

async def main(stop):
    if {broken!r} == "main":
        raise RuntimeError("no start")
    if {broken!r} == "main cannot run":
        raise CannotRun("the queue is made of cheese; bake another")
    async with background(stop, Loop()):
        print("up", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        if {slow!r}:
            await asyncio.Event().wait()

logs.configure("example", "info")
sys.exit(run_service(main))
"""


async def start(broken: str = "", slow: bool = False) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVICE.format(broken=broken, slow=slow)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_stops_gracefully(number: signal.Signals) -> None:
    process = await start()
    assert await line(process) == "up"
    process.send_signal(number)
    assert [await line(process), await line(process)] == ["stopping", "loop ended"]
    _, err = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in err


async def test_the_second_signal_ends_it_at_once() -> None:
    process = await start(slow=True)
    assert await line(process) == "up"
    process.send_signal(signal.SIGTERM)
    assert await line(process) == "stopping"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await process.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("broken", "words"),
    [("raises", b"a background loop broke"), ("returns", b"a background loop returned")],
)
async def test_a_broken_loop_ends_the_process_and_is_named(broken: str, words: bytes) -> None:
    process = await start(broken)
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    assert process.returncode == 1
    assert b"stopping" in out  # main still ended its work
    assert words in err
    assert b'"loop": "relay"' in err


async def test_a_service_that_fails_says_why_in_its_log_and_exits_1() -> None:
    process = await start("main")
    async with asyncio.timeout(20):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert b"RuntimeError: no start" in err
    assert all(text.startswith(b"{") for text in err.splitlines())


@pytest.mark.parametrize("broken", ["main cannot run", "loop cannot run"])
async def test_what_a_service_cannot_run_on_is_one_line_without_a_traceback(broken: str) -> None:
    process = await start(broken)
    async with asyncio.timeout(20):
        _, err = await process.communicate()
    assert process.returncode == 1
    (event,) = [json.loads(text) for text in err.splitlines()]
    assert (event["event"], event["level"]) == ("the service cannot run", "error")
    assert event["why"] == "the queue is made of cheese; bake another"
    assert "exception" not in event
