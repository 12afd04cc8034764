import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from pydantic import JsonValue, ValidationError

from aijobs.canonical import JsonObject
from aijobs.failures import ExecutionFailed
from aijobs.job_type import EarlierError, ExecutionContext, ModelRequest, ProjectedJob
from aijobs.testing.contexts import make_context
from aijobs_jobtypes.synthetic.definition import DEFINITION, SyntheticInput, SyntheticOutput
from aijobs_jobtypes.synthetic.executor import execute
from aijobs_jobtypes.synthetic.projector import project

ROOT = Path(__file__).parents[3]


class NoModels:
    async def generate_json(self, request: ModelRequest) -> JsonObject:
        raise AssertionError(f"a synthetic job asks no model: {request}")


def context(
    *, attempt: int = 1, failures: int = 0, reports: list[float] | None = None, **values: JsonValue
) -> ExecutionContext[SyntheticInput]:
    seen = [] if reports is None else reports

    def progress(percent: float) -> None:
        seen.append(percent)

    return make_context(
        SyntheticInput.model_validate(values),
        models=NoModels(),
        attempt=attempt,
        progress=progress,
        earlier_errors=[EarlierError(code="X", feedback="")] * failures,
    )


async def test_by_default_it_does_nothing_and_never_waits():
    work = execute(context())
    with pytest.raises(StopIteration) as ended:
        work.send(None)
    assert ended.value.value == SyntheticOutput(executions=1)


async def test_it_echoes_and_pads():
    output = await execute(context(echo={"a": [1]}, output_bytes=1000))
    assert (output.echo, len(output.padding)) == ({"a": [1]}, 1000)


@pytest.mark.parametrize("attempt", [1, 7])
async def test_failures_are_counted_over_the_whole_job_whatever_the_attempt(attempt):
    for failures in (0, 1):
        with pytest.raises(ExecutionFailed) as failed:
            await execute(context(attempt=attempt, failures=failures, fail_times=2, fail_code="VALIDATION_X"))
        assert failed.value.code == "VALIDATION_X"
    assert (await execute(context(attempt=attempt, failures=2, fail_times=2))).executions == 3


def test_the_largest_count_of_failures_is_more_than_the_retries():
    assert SyntheticInput(fail_times=5).fail_times > DEFINITION.max_retries


async def test_progress_is_reported_in_steps():
    reports: list[float] = []
    await execute(context(progress_steps=4, reports=reports))
    assert reports == [25, 50, 75, 100]


async def test_a_sleep_is_cancelled_at_once():
    task = asyncio.create_task(execute(context(sleep_ms=60_000)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_sleep_that_ignores_cancellation_goes_on_to_its_end():
    start = time.monotonic()
    task = asyncio.create_task(execute(context(sleep_ms=200, cancellation="ignore", echo=1)))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert (await task).echo == 1
    assert time.monotonic() - start >= 0.19


async def test_blocking_holds_the_event_loop():
    ticked = []
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, lambda: ticked.append(time.monotonic()))
    start = time.monotonic()
    await execute(context(block_ms=100))
    assert ticked == []
    assert time.monotonic() - start >= 0.1


@pytest.mark.parametrize(("attempt", "killed"), [(2, True), (3, False)])
async def test_it_kills_its_process_up_to_an_attempt(attempt, killed):
    program = f"""
import asyncio
from tests.unit.jobtypes.test_synthetic import context, execute
asyncio.run(execute(context(kill=True, kill_attempts=2, attempt={attempt})))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT)
    async with asyncio.timeout(30):
        assert await process.wait() == (-signal.SIGKILL if killed else 0)


@pytest.mark.parametrize(
    "values",
    [
        {"sleep_ms": -1},
        {"sleep_ms": 600_001},
        {"block_ms": 60_001},
        {"fail_times": 6},
        {"fail_code": "lower"},
        {"output_bytes": 2_000_001},
        {"progress_steps": 101},
        {"cancellation": "maybe"},
        {"kill_attempts": 0},
        {"sleep": 1},
    ],
)
def test_an_input_out_of_bounds_is_refused(values):
    with pytest.raises(ValidationError):
        SyntheticInput.model_validate(values)


def test_the_artifact_is_small_whatever_the_output():
    job = ProjectedJob(job_id="j", job_type="synthetic", user_id="u", input=SyntheticInput())
    (artifact,) = project(job, SyntheticOutput(executions=2, padding="x" * 10**6)).artifacts
    assert artifact.type == "synthetic_output"
    assert artifact.content == {"executions": 2, "output_bytes": 10**6}
