"""The example in examples/job_type, found through its entry point without being installed."""

import json
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from aijobs.canonical import JsonObject
from aijobs.definition import JobDefinition
from aijobs.job_type import EarlierError, ModelRequest, ProjectedJob, artifact_id
from aijobs.registry import ENTRY_POINT_GROUP, Registry
from aijobs.testing.contexts import make_context
from services.executor.gateway.offline.provider import OfflineProvider
from services.executor.gateway.provider import ProviderCall

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "job_type"
TEXT = "Why bridges sing\n\nWind makes the cables of a bridge sway. Cables that sway sing. Engineers damp the cables."


class AskedModel:
    """A gateway that hands the question to the offline provider and keeps it."""

    def __init__(self) -> None:
        self.asked: list[ModelRequest] = []

    async def generate_json(self, request: ModelRequest) -> JsonObject:
        self.asked.append(request)
        call = ProviderCall(
            model="offline",
            messages=request.messages,
            output_schema=request.output_schema,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
        )
        answer: JsonObject = json.loads((await OfflineProvider().complete(call)).text)
        return answer


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDefinition:
    """Let the entry points of the example's pyproject be found, as its installation would."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    distribution = tmp_path / "example.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    entries = project["entry-points"][ENTRY_POINT_GROUP]
    lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
    (distribution / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    return Registry.installed(load_code=True)["example_summary"]


def test_it_is_found_beside_the_built_in_ones_and_its_code_loads(found) -> None:
    names = set(Registry.installed(load_code=True))
    assert {"example_summary", "structured_generation", "synthetic"} <= names
    assert (found.max_retries, found.backoff.total_seconds()) == (2, 5)


async def test_an_execution_gives_an_output_and_one_artifact(found) -> None:
    model = AskedModel()
    wanted = found.input.model.model_validate({"text": TEXT, "longest": 80})
    context = make_context(
        wanted,
        models=model,
        job_type=found.job_type,
        execution=2,
        earlier_errors=[EarlierError(code="VALIDATION_SCHEMA", feedback="summary: too long")],
    )
    output = found.output.model.model_validate(await resolve_name(found.executor)(context))
    assert output.title == "Why bridges sing"
    assert 0 < len(output.summary) <= 80
    assert "summary: too long" in model.asked[0].messages[0].content
    job = ProjectedJob(job_id="job-1", job_type=found.job_type, user_id="user-1", input=wanted)
    (artifact,) = resolve_name(found.projector)(job, output).artifacts
    assert artifact.artifact_id == artifact_id("job-1", "summary", 0)
    assert artifact.content == {"title": output.title, "summary": output.summary}
