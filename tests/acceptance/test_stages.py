"""EX-1, PJ-4: the executor's process dies in each stage of a run, and between any two of them; the job ends right."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from aijobs.v1 import job_pb2
from deploy.local.ports import LOOPBACK
from deploy.local.processes import ServiceProcess
from services.jobs.store.tables import job_artifacts
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.engine import USER, Engine
from tests.acceptance.gate import Gate, Link
from tests.acceptance.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
CANARY = "on-the-wire"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its services find the mortal job type as an installed package's."""
    folder = tmp_path_factory.mktemp("packages")
    distribution = folder / "mortal.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: mortal\nVersion: 1.0.0\n")
    (distribution / "entry_points.txt").write_text(
        "[aijobs.job_types]\nmortal = tests.acceptance.mortal_jobs:DEFINITION\n"
        "mortal_alone = tests.acceptance.mortal_jobs:ALONE\n"
    )
    engine = await make_engine(PYTHONPATH=f"{ROOT}:{folder}")
    await engine.start()
    return engine


@pytest.mark.parametrize("place", ["input", "handler", "output", "projector"])
async def test_somebodys_code_kills_the_executor(engine: Engine, place: str, tmp_path: Path) -> None:
    """RESOLVE, EXECUTE before and after the handler, PROJECT."""
    marker = tmp_path / "marker"
    engine.executor.freeze()
    job_id = await engine.create("mortal", place=place, marker=str(marker))
    # Only now: the jobs service validates inputs too.
    marker.touch()
    engine.executor.thaw()
    await _goes_on_elsewhere(engine, engine.executor, job_id)
    assert not marker.exists()


class Watched(Link):
    """Kills a process when the last of some texts is about to pass, which it then does not."""

    def __init__(self, kill: Callable[[], None], script: list[tuple[str, bytes]]) -> None:
        self._kill = kill
        self._script = script

    async def sent(self, data: bytes) -> bool:
        """See what the executor asks."""
        return self._passes("sent", data)

    async def answered(self, data: bytes) -> bool:
        """See what it is answered."""
        return self._passes("answered", data)

    def _passes(self, way: str, data: bytes) -> bool:
        if not self._script or self._script[0][0] != way or self._script[0][1] not in data:
            return True
        self._script.pop(0)
        if self._script:
            return True
        self._kill()
        return False


REPORT = f'"echo":"{CANARY}"'.encode()


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        # PREPARE: the lock is granted, and whoever asked for it never hears of it.
        ([("answered", CANARY.encode())], ["created", "locked", "lapsed", "taken_over", "succeeded"]),
        # COMPLETE: the report is made, and never leaves the machine.
        ([("sent", REPORT)], ["created", "locked", "lapsed", "taken_over", "succeeded"]),
        # COMPLETE: the report arrives, and whoever sent it never hears of that.
        ([("sent", REPORT), ("answered", USER.encode())], ["created", "locked", "succeeded"]),
    ],
    ids=["lock answered", "report not sent", "report not answered"],
)
async def test_the_executor_dies_between_two_stages(
    engine: Engine, script: list[tuple[str, bytes]], kinds: list[str]
) -> None:
    left = list(script)
    dying: list[ServiceProcess] = []
    gate = Gate(f"tcp://{engine.connections.jobs_address}", link=lambda: Watched(lambda: _kill(dying), left))
    await gate.open()
    await engine.executor.stop()
    dying.append(await engine.add("executor", AIJOBS_ADDRESS=f"{LOOPBACK}:{gate.port}"))
    job_id = await engine.create(echo=CANARY)
    await dying[0].wait()
    assert left == []
    await engine.executor.start()
    job = await engine.ended(job_id)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED
    assert await engine.kinds(job_id) == kinds
    assert len(await engine.read(job_artifacts, job_id=job_id)) == 1
    await gate.shut()


def _kill(dying: list[ServiceProcess]) -> None:
    assert dying[0].pid is not None
    os.kill(dying[0].pid, signal.SIGKILL)


async def test_a_killed_executor_takes_its_isolated_runs_along_with_what_they_have_started(
    engine: Engine, tmp_path: Path
) -> None:
    """EX-11: also while the code holds the interpreter."""
    marker = tmp_path / "pids"
    job_id = await engine.create("mortal_alone", place="spawn", marker=str(marker))
    await until(lambda: marker.exists() and len(marker.read_text().split()) > 1, "the handler to run")
    pids = [int(pid) for pid in marker.read_text().split()]
    assert all(_alive(pid) for pid in pids)
    await engine.executor.kill()
    await until(lambda: not any(_alive(pid) for pid in pids), "both to end")
    await engine.executor.start()
    job = await engine.ended(job_id)
    assert (job.state, job.takeover_count) == (job_pb2.JOB_STATE_SUCCEEDED, 1)


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _goes_on_elsewhere(engine: Engine, executor: ServiceProcess, job_id: str) -> None:
    await executor.wait()
    await executor.start()
    job = await engine.ended(job_id)
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job
    # One executor was lost, so one takeover; nothing failed, so no retry.
    assert (job.attempt, job.takeover_count, job.retry_count) == (2, 1, 0)
    assert await engine.kinds(job_id) == ["created", "locked", "lapsed", "taken_over", "succeeded"]
    assert len(await engine.read(job_artifacts, job_id=job_id)) == 1
