"""`make up` and `make down` with real processes: stand-ins for the services, real servers."""

import asyncio
import json
import os
import signal
import stat
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.leftovers import processes_about, until_gone

ROOT = Path(__file__).resolve().parents[2]
UP = str(ROOT / "tests" / "stand_ins" / "up.py")
READY = "stop it:"


class Up:
    """A `make up` in progress and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.said = ""

    async def until(self, text: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while text not in self.said:
                line = await self.process.stdout.readline()
                assert line, self.said
                self.said += line.decode()

    async def ended(self) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            self.said += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    def pids(self) -> dict[str, int]:
        rows = json.loads((self.folder / "status.json").read_text())
        return {row["service"]: int(row["pid"]) for row in rows if row["pid"]}


async def start(*arguments: str, environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, UP, *arguments),
        cwd=ROOT,
        # The script's own folder is on its path; the project's comes with this.
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def run(folder: Path, action: str) -> tuple[int | None, str]:
    process = await start(str(folder), action, environment={})
    said, _ = await process.communicate()
    return process.returncode, said.decode()


@pytest.fixture
def up(tmp_path):
    @asynccontextmanager
    async def running(environment: dict[str, str], migration: str = ""):
        folder = tmp_path / "up"
        process = await start(str(folder), "up", migration, environment=environment)
        try:
            yield Up(process, folder)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await until_gone(tmp_path)

    return running


@pytest.fixture
def external(mariadb_url, rabbitmq_url) -> dict[str, str]:
    return {"AIJOBS_DATABASE_URL": mariadb_url, "AIJOBS_BROKER_URL": rabbitmq_url}


async def test_up_on_own_servers_runs_once_until_down_and_leaves_nothing(up, tmp_path):
    own = {"AIJOBS_DATABASE_URL": "", "AIJOBS_BROKER_URL": ""}
    async with up(own, "import os; print('migrating', os.environ['AIJOBS_DATABASE_URL'])") as first:
        await first.until(READY)
        for name in ("database", "broker", "jobs", "dispatcher", "executor"):
            assert name in first.pids()
            assert name in first.said
        assert "migrating mysql+aiomysql://" in (first.folder / "migrate.log").read_text()
        status, said = await run(first.folder, "status")
        assert status == 0
        assert said.count("running") == 5

        status, said = await run(first.folder, "up")
        assert status == 1
        assert "already running" in said

        status, said = await run(first.folder, "down")
        assert status == 0
        assert await first.ended() == 0
        assert processes_about(tmp_path) == []
        stopped = [line.split()[1] for line in first.said.splitlines() if line.startswith("stopping ")]
        assert stopped == ["executor", "dispatcher", "jobs", "broker", "database"]
        for name in ("jobs", "dispatcher", "executor"):
            assert "stopped in an orderly way" in (first.folder / f"{name}.log").read_text()
        assert (first.folder / "mariadb" / "data").exists()


async def test_down_and_status_without_anything_running_say_so(tmp_path):
    assert await run(tmp_path, "down") == (0, "nothing is running\n")
    assert await run(tmp_path, "status") == (1, "nothing is running\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_everything_and_is_no_failure(up, external, tmp_path, number):
    async with up(external) as running:
        await running.until(READY)
        running.process.send_signal(number)
        assert await running.ended() == 0
        assert processes_about(tmp_path) == []


async def test_each_service_gets_what_it_needs_and_no_more(up, external):
    # As in a shell that sourced the file of an earlier run.
    async with up({**external, "AIJOBS_TOKEN": "mine", "AIJOBS_ADDRESS": "x:1", "AIJOBS_OTHER": "kept"}) as running:
        await running.until(READY)
        seen = {}
        for name in ("jobs", "dispatcher", "executor"):
            lines = (running.folder / f"{name}.log").read_text().splitlines()
            seen[name] = dict(line.split("=", 1) for line in lines if line.startswith("AIJOBS_"))
        common = {"AIJOBS_LISTEN", "AIJOBS_TOKEN_SECRET", "AIJOBS_OTHER"}
        assert set(seen["jobs"]) == common | {"AIJOBS_DATABASE_URL"}
        for name in ("dispatcher", "executor"):
            assert set(seen[name]) == common | {"AIJOBS_BROKER_URL", "AIJOBS_ADDRESS", "AIJOBS_TOKEN"}
            assert seen[name]["AIJOBS_ADDRESS"] == seen["jobs"]["AIJOBS_LISTEN"]
            assert seen[name]["AIJOBS_TOKEN"] == f"token-of-{name}-as-{name}"
        assert len(seen["jobs"]["AIJOBS_TOKEN_SECRET"]) >= 32
        exports = (running.folder / "env").read_text()
        assert f"export AIJOBS_ADDRESS={seen['jobs']['AIJOBS_LISTEN']}\n" in exports
        assert "export AIJOBS_TOKEN=token-of-developer-as-admin+backend+user\n" in exports
        for secret in ("env", "token-secret", "status.json"):
            assert stat.S_IMODE((running.folder / secret).stat().st_mode) == 0o600
        # Neither secrets nor passwords on the screen.
        assert seen["jobs"]["AIJOBS_TOKEN_SECRET"] not in running.said
        assert external["AIJOBS_DATABASE_URL"] not in running.said


async def test_a_service_that_dies_stops_everything_with_its_log_shown(up, external, tmp_path):
    async with up(external) as running:
        await running.until(READY)
        os.kill(running.pids()["dispatcher"], signal.SIGKILL)
        assert await running.ended() == 1
        assert "dispatcher ended with exit status 137" in running.said
        assert "AIJOBS_LISTEN=" in running.said
        assert processes_about(tmp_path) == []


async def test_a_failed_migration_starts_nothing_and_is_shown(up, external):
    async with up(external, "raise SystemExit('the schema is from the future')") as running:
        assert await running.ended() == 1
        assert "the schema is from the future" in running.said
        assert not (running.folder / "jobs.log").exists()


async def test_after_a_kill_nothing_is_left_and_up_starts_again(up, external, tmp_path):
    async with up(external) as running:
        await running.until(READY)
        running.process.kill()
        await running.process.wait()
        await until_gone(tmp_path)
        assert await run(running.folder, "status") == (1, "nothing is running\n")
    async with up(external) as again:
        await again.until(READY)
        status, _ = await run(again.folder, "down")
        assert status == 0
        assert await again.ended() == 0


async def test_a_signal_while_starting_stops_what_has_started(up, external, tmp_path):
    async with up({**external, "AIJOBS_DATABASE_URL": ""}, "import signal; signal.pause()") as running:
        await running.until("migrating")
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0
        assert "stopping database" in running.said
        assert processes_about(tmp_path) == []
