"""Definition of structured generation: what callers send, and what they get."""

from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationInfo, field_validator

from aijobs.canonical import JsonObject
from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema
from aijobs.job_type import ModelTier
from aijobs.schema import check_schema
from aijobs_jobtypes.structured_generation import template as templates

LONGEST_TEXT = 200_000
LONGEST_DOCUMENT = 800_000
MOST_VARIABLES = 100

Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class Limits(BaseModel):
    """Bounds of the model's answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_output_tokens: Annotated[int, Field(ge=1, le=32_768)] = 4096
    temperature: Annotated[float, Field(ge=0, le=2, description="0 is the most predictable.")] = 0.3


class StructuredGenerationInput(BaseModel):
    """One question to a model: exactly one of `prompt` and `template`, and the schema of the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Annotated[Text | None, Field(description="The question as it is.")] = None
    template: Annotated[
        Text | None, Field(description="The question with places for variables: {{ name }}.", validate_default=True)
    ] = None
    variables: Annotated[
        dict[VariableName, Annotated[str, Field(max_length=LONGEST_TEXT)]],
        Field(
            default_factory=dict,
            max_length=MOST_VARIABLES,
            description="A text for each placeholder of the template, and no others.",
            validate_default=True,
        ),
    ]
    system: Annotated[Text | None, Field(description="Instructions: role, tone, rules.")] = None
    document: Annotated[
        Annotated[str, Field(min_length=1, max_length=LONGEST_DOCUMENT)] | None,
        Field(description="A text to work on; it follows the question."),
    ] = None
    output_schema: Annotated[
        JsonObject, Field(description="JSON Schema (2020-12) of the answer; its type is object, its size up to 64 KiB.")
    ]
    model_tier: Annotated[ModelTier, Field(description="How capable a model to ask.")] = ModelTier.PRIMARY
    limits: Limits = Limits()

    @field_validator("template")
    @classmethod
    def _one_question(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            templates.parse(value)
        # A prompt that was refused itself is not in here.
        if "prompt" in info.data and (value is None) == (info.data["prompt"] is None):
            raise ValueError("send exactly one of prompt and template")
        return value

    @field_validator("variables")
    @classmethod
    def _match_placeholders(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if "template" not in info.data:
            return value
        source = info.data["template"]
        template = templates.parse(source or "")
        names = template.names
        missing, unused = sorted(names - value.keys()), sorted(value.keys() - names)
        if missing:
            raise ValueError(f"the template needs a variable that is not there: {', '.join(missing)[:200]}")
        if unused:
            raise ValueError(f"no placeholder uses this variable: {', '.join(unused)[:200]}")
        if (length := template.length(value)) > LONGEST_TEXT:
            raise ValueError(f"the template would give {length} characters; at most {LONGEST_TEXT} are allowed")
        return value

    @field_validator("output_schema")
    @classmethod
    def _usable_schema(cls, value: JsonObject) -> JsonObject:
        check_schema(value)
        return value

    @property
    def question(self) -> str:
        """The prompt, or the template with its variables filled in."""
        if self.template is None:
            return self.prompt or ""
        return templates.parse(self.template).render(self.variables)


class StructuredGenerationOutput(RootModel[JsonObject]):
    """A JSON object that fits the `output_schema` of the input."""


DEFINITION = JobDefinition(
    job_type="structured_generation",
    metadata=Metadata(
        label="Structured generation",
        description="Asks a model a question and returns a JSON object that fits the caller's JSON Schema.",
        domain="generation",
        version="1.0.0",
    ),
    routing=Routing(queue=Queue.INTERACTIVE),
    execution=Execution(
        timeout=timedelta(seconds=60),
        max_retries=1,
        backoff=timedelta(seconds=2),
        cancellable=True,
        abort_strategy="retry",
    ),
    input=Schema(version="1", model=StructuredGenerationInput),
    output=Schema(version="1", model=StructuredGenerationOutput),
    executor="aijobs_jobtypes.structured_generation.executor:execute",
    projector="aijobs_jobtypes.structured_generation.projector:project",
)
