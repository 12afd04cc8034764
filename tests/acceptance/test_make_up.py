"""`make up` and `make down` with the real services."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deploy.local.running import ProcessIdentity
from tests.acceptance.command import ROOT, Ended, Running, aijobs
from tests.leftovers import processes_about


async def local(action: str, folder: Path) -> Ended:
    return await (await Running.start("-m", "deploy.local", action, "--folder", str(folder), environment={})).ended()


def exports(folder: Path) -> dict[str, str]:
    """Read the file that a developer sources."""
    lines = (folder / "env").read_text().splitlines()
    return dict(shlex.split(line)[1].split("=", 1) for line in lines)


def broker_url(folder: Path) -> str:
    """Return what the commands on the page of the example subscriber find out."""
    page = (ROOT / "examples" / "subscriber" / "README.md").read_text()
    (block,) = re.findall(r"```sh\n(address.*?)\S+ examples/subscriber/subscriber.py", page, re.DOTALL)
    script = block.replace(".aijobs/up", str(folder)) + 'echo -n "$SUBSCRIBER_BROKER_URL"'
    shell = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return shell.stdout


async def told(folder: Path, environment: Mapping[str, str]) -> None:
    """Let the example subscriber hear of a job's end."""
    variables = {"SUBSCRIBER_BROKER_URL": broker_url(folder), "SUBSCRIBER_DATABASE": str(folder / "subscriber.db")}
    subscriber = await Running.start("examples/subscriber/subscriber.py", environment=variables)
    try:
        await subscriber.until("subscribed")
        created = await aijobs("--json", "jobs", "create", "synthetic", "--user", "me", environment=environment)
        assert created.status == 0, created
        await subscriber.until(" succeeded\n")
        subscriber.process.terminate()
        assert (await subscriber.ended()).status == 0
    finally:
        await subscriber.end()


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
        await told(folder, developer)

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
