"""The pid file of `make up` names one process, and never another one that got its pid."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.running import PidFile, ProcessIdentity, end_process


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def write(path: Path, *, pid: int, started: str) -> None:
    path.write_text(json.dumps({"pid": pid, "started": started}))


def identity_of(pid: int) -> ProcessIdentity:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return identity


def test_the_first_claim_makes_this_process_the_owner(tmp_path):
    file = PidFile(tmp_path / "pid")
    assert file.owner() is None
    assert file.claim() is None
    assert file.owner() == identity_of(os.getpid())
    file.release()
    assert file.owner() is None


def test_a_claim_is_refused_while_the_owner_runs(tmp_path, other):
    identity = identity_of(other.pid)
    write(tmp_path / "pid", pid=identity.pid, started=identity.started)
    assert PidFile(tmp_path / "pid").claim() == identity
    assert PidFile(tmp_path / "pid").owner() == identity


def test_a_pid_that_somebody_else_got_is_stale(tmp_path, other):
    write(tmp_path / "pid", pid=other.pid, started="another time")
    assert PidFile(tmp_path / "pid").owner() is None
    assert PidFile(tmp_path / "pid").claim() is None


def test_a_pid_that_somebody_else_got_is_not_signalled(other):
    end_process(ProcessIdentity(pid=other.pid, started="another time"), signal.SIGKILL)
    assert other.poll() is None
    end_process(identity_of(other.pid), signal.SIGKILL)
    assert other.wait(10) == -signal.SIGKILL


def test_an_ended_owner_is_stale_also_before_it_is_reaped(tmp_path, other):
    identity = identity_of(other.pid)
    write(tmp_path / "pid", pid=identity.pid, started=identity.started)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert PidFile(tmp_path / "pid").owner() is None
    other.wait()
    assert PidFile(tmp_path / "pid").claim() is None
    end_process(identity, signal.SIGTERM)


@pytest.mark.parametrize("text", ["", "12", "{}", '{"pid": "x"}', "not json"])
def test_a_broken_file_is_stale(tmp_path, text):
    (tmp_path / "pid").write_text(text)
    assert PidFile(tmp_path / "pid").owner() is None
    assert PidFile(tmp_path / "pid").claim() is None
