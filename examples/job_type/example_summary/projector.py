"""What a success leaves behind. Pure: no I/O, no clock, no randomness, so that a repeat gives the same."""

from aijobs.job_type import Artifact, ProjectedJob, Projection, artifact_id
from example_summary.definition import SummaryOutput

ARTIFACT_TYPE = "summary"


def project(job: ProjectedJob, output: SummaryOutput) -> Projection:
    """Keep title and summary as one artifact."""
    return Projection(
        artifacts=[
            Artifact(
                type=ARTIFACT_TYPE,
                artifact_id=artifact_id(job.job_id, ARTIFACT_TYPE, 0),
                ordinal=0,
                content=output.model_dump(mode="json"),
            )
        ]
    )
