"""What callers send, what they get, and how the engine runs it. Read by the jobs service and by the executor."""

from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema


class SummaryInput(BaseModel):
    """The text to summarise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Annotated[str, Field(min_length=1, max_length=200_000)]
    longest: Annotated[int, Field(ge=50, le=2000, description="Characters of the summary at most.")] = 600


class SummaryOutput(BaseModel):
    """What the text says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: Annotated[str, Field(min_length=1, max_length=120)]
    summary: Annotated[str, Field(min_length=1, max_length=2000)]


DEFINITION = JobDefinition(
    job_type="example_summary",
    metadata=Metadata(
        label="Example: summary",
        description="Asks a model for the title and a summary of a text.",
        domain="generation",
        version="1.0.0",
    ),
    routing=Routing(queue=Queue.BACKGROUND),
    # Retries and backoff are the queue's; a timeout is worth another try.
    execution=Execution(timeout=timedelta(seconds=60), abort_strategy="retry"),
    input=Schema(version="1", model=SummaryInput),
    output=Schema(version="1", model=SummaryOutput),
    # Named, not imported: only the executor loads them.
    executor="example_summary.executor:execute",
    projector="example_summary.projector:project",
)
