from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from aijobs.canonical import JsonObject
from aijobs.definition import Queue
from aijobs.job_type import EarlierError, ModelRequest, ModelTier, ProjectedJob, artifact_id
from aijobs.registry import Registry
from aijobs.testing.contexts import make_context
from aijobs_jobtypes.structured_generation import template as templates
from aijobs_jobtypes.structured_generation.definition import (
    DEFINITION,
    StructuredGenerationInput,
    StructuredGenerationOutput,
)
from aijobs_jobtypes.structured_generation.executor import execute
from aijobs_jobtypes.structured_generation.projector import project

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**values: object) -> StructuredGenerationInput:
    return StructuredGenerationInput.model_validate({"output_schema": SCHEMA, **values})


class Models:
    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def generate_json(self, request: ModelRequest) -> JsonObject:
        self.requests.append(request)
        return {"a": 1}


async def run(
    wanted: StructuredGenerationInput, earlier_errors: Sequence[EarlierError] = ()
) -> tuple[JsonObject, ModelRequest]:
    models = Models()
    output = await execute(make_context(wanted, models=models, earlier_errors=earlier_errors))
    (request,) = models.requests
    return output, request


def test_it_is_installed_and_its_code_loads():
    definition = Registry.installed(load_code=True)["structured_generation"]
    assert definition == DEFINITION
    assert definition.routing.queue is Queue.INTERACTIVE
    assert definition.max_retries == 1
    assert definition.execution.abort_strategy == "retry"


async def test_the_question_goes_out_with_schema_and_limits():
    wanted = read(
        template="Tell {{ name }} in {{ n }} words.",
        variables={"name": "Ann {{ n }}", "n": "ten"},
        system="You are terse.",
        document="Line.\n",
        model_tier="strong",
        limits={"max_output_tokens": 99, "temperature": 0},
    )
    output, request = await run(wanted)
    assert output == {"a": 1}
    system, user = request.messages
    assert (system.role, user.role) == ("system", "user")
    assert system.content.startswith("You are terse.\n\nYou answer with exactly one JSON object")
    assert '{"properties":{"a":{"type":"integer"}},"type":"object"}' in system.content
    assert "refused" not in system.content
    # What a variable holds is no template.
    assert user.content == "Tell Ann {{ n }} in ten words.\n\n<document>\nLine.\n</document>"
    assert request.output_schema == SCHEMA
    assert (request.tier, request.max_output_tokens, request.temperature) == (ModelTier.STRONG, 99, 0)
    assert (request.prompt_key, request.prompt_version) == ("structured-generation", "1")


async def test_a_prompt_goes_out_as_it_is():
    _, request = await run(read(prompt="What is {{ this }}?"))
    assert request.messages[1].content == "What is {{ this }}?"
    assert (request.tier, request.max_output_tokens, request.temperature) == (ModelTier.PRIMARY, 4096, 0.3)


async def test_earlier_errors_are_fed_back_once_each():
    errors = [
        EarlierError(code="PROVIDER_TIMEOUT", feedback=""),
        EarlierError(code="VALIDATION_SCHEMA", feedback="$.a: missing"),
        EarlierError(code="VALIDATION_SCHEMA", feedback="$.a: missing"),
        EarlierError(code="VALIDATION_NOT_JSON", feedback="{{ no }} JSON"),
    ]
    _, request = await run(read(prompt="x"), errors)
    assert request.messages[0].content.endswith("\n- $.a: missing\n- {{ no }} JSON")


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({}, "template", "exactly one of prompt and template"),
        ({"prompt": "x", "template": "y"}, "template", "exactly one of prompt and template"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "x" * 200_001}, "prompt", "at most 200000"),
        ({"document": "x" * 800_001, "prompt": "x"}, "document", "at most 800000"),
        ({"template": "{{ a }}"}, "variables", "needs a variable that is not there: a"),
        ({"template": "a", "variables": {"b": "x"}}, "variables", "no placeholder uses this variable: b"),
        ({"prompt": "a", "variables": {"b": "x"}}, "variables", "no placeholder uses this variable: b"),
        ({"template": "{{ a }}", "variables": {"a": 1}}, "variables.a", "string"),
        ({"template": "{{ a }}" * 3, "variables": {"a": "x" * 100_000}}, "variables", "would give 300000 characters"),
        ({"template": "a\n{{ b | upper }}", "variables": {"b": "x"}}, "template", "line 2: Filter"),
        ({"template": "{% if a %}x{% endif %}"}, "template", "line 1: If"),
        ({"template": "{{ 'a' }}"}, "template", "line 1: Const"),
        ({"template": "{{ a.b }}"}, "template", "line 1: Getattr"),
        ({"template": "{{ a() }}"}, "template", "line 1: Call"),
        ({"template": "{{ a"}, "template", "line 1: "),
        ({"template": "{{ " + "(" * 5000 + "a" + ")" * 5000 + " }}"}, "template", "nested too deeply"),
        ({"prompt": "x", "output_schema": {"type": "array"}}, "output_schema", "$.type: "),
        ({"prompt": "x", "output_schema": "object"}, "output_schema", "dictionary"),
        ({"prompt": "x", "model_tier": "huge"}, "model_tier", "'primary' or 'strong'"),
        ({"prompt": "x", "limits": {"max_output_tokens": 0}}, "limits.max_output_tokens", "greater than or equal to 1"),
        ({"prompt": "x", "limits": {"max_output_tokens": 32_769}}, "limits.max_output_tokens", "32768"),
        ({"prompt": "x", "limits": {"temperature": 2.1}}, "limits.temperature", "less than or equal to 2"),
        ({"prompt": "x", "limits": {"top_p": 1}}, "limits.top_p", "not permitted"),
        ({"prompt": "x", "promt": "y"}, "promt", "not permitted"),
    ],
)
def test_a_bad_input_is_refused_at_its_field(values, field, words):
    with pytest.raises(ValidationError) as refusal:
        read(**values)
    (error,) = refusal.value.errors()
    assert ".".join(map(str, error["loc"])) == field
    assert words in error["msg"]


def test_a_template_keeps_its_text_as_it_is():
    parsed = templates.parse("<b>&{{ a }}\n  {{a}}\n")
    assert parsed.render({"a": "<i>"}) == "<b>&<i>\n  <i>\n"
    assert parsed.length({"a": "<i>"}) == len(parsed.render({"a": "<i>"}))


def test_the_answer_is_the_one_artifact():
    job = ProjectedJob(job_id="j", job_type="structured_generation", user_id="u", input=read(prompt="x"))
    projection = project(job, StructuredGenerationOutput.model_validate({"a": 1}))
    (artifact,) = projection.artifacts
    assert (artifact.type, artifact.ordinal, artifact.content) == ("structured_output", 0, {"a": 1})
    assert artifact.artifact_id == artifact_id("j", "structured_output", 0)
