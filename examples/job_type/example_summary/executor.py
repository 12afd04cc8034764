"""The work of one execution: one question to a model."""

from aijobs.canonical import JsonObject
from aijobs.job_type import ExecutionContext, Message, ModelRequest
from example_summary.definition import SummaryInput

INSTRUCTIONS = "You summarise texts. Answer with a JSON object that has a title and a summary, in the text's language."


async def execute(context: ExecutionContext[SummaryInput]) -> JsonObject:
    """Ask once. The engine repeats us if that helps, and checks what we return against the output model.

    Raises:
        ExecutionFailed: see `aijobs.job_type.ModelGateway`.

    """
    wanted = context.input
    # What was wrong with earlier answers, in words for a model; empty in the first execution.
    feedback = [error.feedback for error in context.earlier_errors if error.feedback]
    return await context.models.generate_json(
        ModelRequest(
            messages=[
                Message(role="system", content="\n".join([INSTRUCTIONS, *feedback])),
                Message(role="user", content=f"Summarise this.\n\n<document>\n{wanted.text}\n</document>"),
            ],
            output_schema={
                "type": "object",
                "properties": {
                    "title": {"type": "string", "minLength": 1, "maxLength": 120},
                    "summary": {"type": "string", "minLength": 1, "maxLength": wanted.longest},
                },
                "required": ["title", "summary"],
                "additionalProperties": False,
            },
            prompt_key="example-summary",
            prompt_version="1",
        )
    )
