"""`make up` and `make down` with the real services."""

import json
import shlex
from pathlib import Path

from deploy.local.running import ProcessIdentity
from tests.acceptance.command import Ended, Running, aijobs
from tests.leftovers import processes_about


async def local(action: str, folder: Path) -> Ended:
    return await (await Running.start("-m", "deploy.local", action, "--folder", str(folder), environment={})).ended()


def exports(folder: Path) -> dict[str, str]:
    """Read the file that a developer sources."""
    lines = (folder / "env").read_text().splitlines()
    return dict(shlex.split(line)[1].split("=", 1) for line in lines)


async def test_up_runs_jobs_until_down_and_leaves_no_process(tmp_path):
    folder = tmp_path / "up"
    up = await Running.start("-m", "deploy.local", "up", "--folder", str(folder), environment={})
    try:
        await up.until("stop it:")
        rows = {row["service"]: row for row in json.loads((folder / "status.json").read_text())}
        assert set(rows) == {"database", "broker", "jobs", "dispatcher", "executor"}
        pids = [int(row["pid"]) for row in rows.values()]

        developer = exports(folder)
        created = await aijobs("jobs", "create", "synthetic", "--user", "me", "--watch", environment=developer)
        assert (created.status, created.err) == (0, ""), (created, up.said)
        assert "succeeded" in created.out
        types = await aijobs("--json", "types", environment=developer)
        assert types.status == 0
        refused = await aijobs("jobs", "list", environment={"AIJOBS_ADDRESS": developer["AIJOBS_ADDRESS"]})
        assert refused.status == 4

        down = await local("down", folder)
        assert down.status == 0
        ended = await up.ended()
        assert ended.status == 0
        assert processes_about(tmp_path) == []
        assert [pid for pid in pids if ProcessIdentity.of(pid)] == []
        down = await local("down", folder)
        assert (down.status, down.out) == (0, "nothing is running\n")
    finally:
        await up.end()
