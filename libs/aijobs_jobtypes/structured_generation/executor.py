"""Executor of structured generation: one question, one checked answer.

system   the caller's instructions, how to answer, the schema in words, what was wrong with earlier answers
user     the question, then the document between <document> lines
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources

from aijobs import canonical
from aijobs.canonical import JsonObject
from aijobs.job_type import EarlierError, ExecutionContext, Message, ModelRequest
from aijobs_jobtypes.structured_generation import template as templates
from aijobs_jobtypes.structured_generation.definition import StructuredGenerationInput

PROMPT_KEY = "structured-generation"
PROMPT_VERSION = "1"


async def execute(context: ExecutionContext[StructuredGenerationInput]) -> JsonObject:
    """Ask the model once and return its answer, validated against the caller's schema by the gateway.

    Raises:
        ExecutionFailed: see `aijobs.job_type.ModelGateway`.

    """
    wanted = context.input
    return await context.models.generate_json(
        ModelRequest(
            messages=[
                Message(role="system", content=_instructions(context)),
                Message(role="user", content=_question(wanted)),
            ],
            output_schema=wanted.output_schema,
            tier=wanted.model_tier,
            max_output_tokens=wanted.limits.max_output_tokens,
            temperature=wanted.limits.temperature,
            prompt_key=PROMPT_KEY,
            prompt_version=PROMPT_VERSION,
        )
    )


def _instructions(context: ExecutionContext[StructuredGenerationInput]) -> str:
    schema = canonical.dump(context.input.output_schema)
    parts = [context.input.system, _prompt(PROMPT_KEY).render({"output_schema": schema})]
    if errors := _errors(context.earlier_errors):
        parts.append(_prompt("earlier-errors").render({"errors": errors}))
    return "\n\n".join(part.strip() for part in parts if part)


def _errors(earlier: Sequence[EarlierError]) -> str:
    # A provider that was down is nothing that the model could do better; such errors have no feedback.
    said = dict.fromkeys(error.feedback.strip() for error in earlier if error.feedback.strip())
    return "\n".join(f"- {feedback}" for feedback in said)


def _question(wanted: StructuredGenerationInput) -> str:
    if wanted.document is None:
        return wanted.question
    return f"{wanted.question}\n\n<document>\n{wanted.document.strip()}\n</document>"


@cache
def _prompt(key: str) -> templates.Template:
    file = resources.files("aijobs_jobtypes.structured_generation") / "prompts" / f"{key}.{PROMPT_VERSION}.md"
    return templates.parse(file.read_text(encoding="utf-8"))
