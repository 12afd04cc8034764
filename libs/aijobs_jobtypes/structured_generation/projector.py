"""Projector of structured generation: the answer is the one artifact."""

from aijobs.job_type import Artifact, ProjectedJob, Projection, artifact_id
from aijobs_jobtypes.structured_generation.definition import StructuredGenerationOutput

ARTIFACT_TYPE = "structured_output"


def project(job: ProjectedJob, output: StructuredGenerationOutput) -> Projection:
    """Keep the whole answer."""
    return Projection(
        artifacts=[
            Artifact(
                type=ARTIFACT_TYPE,
                artifact_id=artifact_id(job.job_id, ARTIFACT_TYPE, 0),
                ordinal=0,
                content=output.root,
            )
        ]
    )
