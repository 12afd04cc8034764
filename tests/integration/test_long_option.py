"""Tests that take minutes run only when asked for."""

import asyncio
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.long
def test_minutes(): pass

def test_seconds(): pass
"""


@pytest.mark.parametrize(
    ("options", "expected"), [([], "1 passed, 1 deselected"), (["--long"], "2 passed")], ids=["without", "with"]
)
async def test_long_tests_are_deselected_unless_asked_for(tmp_path, options, expected):
    (tmp_path / "test_sample.py").write_text(TESTS)
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", *options, str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await run.communicate()
    assert expected in said.decode()
    assert "skipped" not in said.decode()
