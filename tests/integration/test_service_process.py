"""Services as child processes."""

import asyncio
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from deploy import health
from deploy.local.guarded import ProcessFailedError
from deploy.local.ports import free_port
from deploy.local.processes import ServiceProcess
from tests.leftovers import processes_about, until_gone

ROOT = Path(__file__).resolve().parents[2]
SERVICE = str(ROOT / "tests" / "stand_ins" / "service.py")


@pytest.fixture
async def service(tmp_path, lifeline):
    made = []

    def make(mode: str) -> ServiceProcess:
        address = f"127.0.0.1:{free_port()}"
        made.append(
            ServiceProcess(
                "stand-in",
                arguments=[SERVICE, mode],
                address=address,
                environment={"AIJOBS_LISTEN": address, "AIJOBS_MARK": str(tmp_path)},
                log=tmp_path / "service.log",
                lifeline=lifeline,
            )
        )
        return made[-1]

    yield make
    for process in made:
        await process.kill()


async def test_a_started_service_serves_and_a_stopped_one_ends_in_an_orderly_way(service, tmp_path):
    process = service("serve")
    await process.start()
    assert await process.health() == "SERVING"
    assert process.pid is not None
    await process.stop()
    assert process.pid is None
    assert await process.wait() == 0
    assert "stopped in an orderly way" in process.log.read_text()
    assert processes_about(tmp_path) == []


async def test_a_killed_service_can_be_started_again_on_its_address(service):
    process = service("serve")
    await process.start()
    first = process.pid
    await process.kill()
    assert await process.wait() == 128 + 9
    assert await process.health() == "UNAVAILABLE"
    await process.restart()
    assert process.pid != first
    assert await process.health() == "SERVING"


async def test_a_frozen_service_does_not_answer_until_thawed_and_can_be_stopped_frozen(service):
    process = service("serve")
    await process.start()
    process.freeze()
    assert await process.health() in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    process.thaw()
    await process.ready(within=timedelta(seconds=10))
    process.freeze()
    await process.stop()
    assert await process.wait() == 0


async def test_a_service_that_ends_while_starting_is_an_error_with_its_last_words(service):
    with pytest.raises(ProcessFailedError, match=r"(?s)stand-in ended with exit status 3.*made of cheese"):
        await service("refuse").start()


async def test_a_service_that_does_not_get_ready_is_ended_and_an_error(service, tmp_path):
    with pytest.raises(ProcessFailedError, match=r"(?s)not ready.*NOT_SERVING.*serving"):
        await service("starting").start(within=timedelta(seconds=2))
    assert processes_about(tmp_path) == []


async def test_the_container_health_check_agrees(service):
    process = service("serve")
    await process.start()
    assert await asyncio.to_thread(health.serves, process.address)
    await process.kill()
    assert not await asyncio.to_thread(health.serves, process.address)


LEADER = """
import os, sys
from deploy.local.shared import SharedServers, shared_database
servers = SharedServers()
print(servers.folder, flush=True)
shared_database(servers.folder, {})
print("ready", flush=True)
input()
servers.end()
"""
WORKER = """
import sys
from pathlib import Path
from deploy.local.shared import shared_database
print(shared_database(Path(sys.argv[1]), {}), flush=True)
"""


async def run_leader() -> tuple[asyncio.subprocess.Process, Path]:
    leader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LEADER),
        cwd=ROOT,
        env={**os.environ, "AIJOBS_TEST_DATABASE_URL": ""},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert leader.stdout is not None
    return leader, Path((await leader.stdout.readline()).decode().strip())


async def run_worker(folder: Path) -> bytes:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(folder)), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    return (await worker.communicate())[0]


async def test_processes_of_a_test_run_share_one_server_that_outlives_the_one_that_started_it():
    leader, folder = await run_leader()
    first, second = await asyncio.gather(run_worker(folder), run_worker(folder))
    assert b"DatabaseAddress" in first
    assert first == second
    # Both workers have ended; the server is still there for the next one.
    assert await run_worker(folder) == first
    assert sum("mariadbd" in line and "guard.py" not in line for line in processes_about(folder)) == 1
    await leader.communicate(b"\n")
    assert leader.returncode == 0
    assert processes_about(folder) == []
    assert not folder.exists()


async def test_shared_servers_end_when_the_leader_of_the_run_is_killed():
    leader, folder = await run_leader()
    assert leader.stdout is not None
    assert await leader.stdout.readline() == b"ready\n"
    assert processes_about(folder)
    leader.kill()
    await leader.wait()
    await until_gone(folder)
    # The data has gone with the server, the logs are for whoever wants to know.
    assert not (folder / "mariadb-template").exists()
    assert not (folder / "database" / "data").exists()
    shutil.rmtree(folder)
