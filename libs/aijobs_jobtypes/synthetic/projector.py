"""Projector of the synthetic job: one small artifact, whatever the size of the output."""

from aijobs.canonical import JsonObject
from aijobs.job_type import Artifact, ProjectedJob, Projection, artifact_id
from aijobs_jobtypes.synthetic.definition import SyntheticOutput

ARTIFACT_TYPE = "synthetic_output"


def project(job: ProjectedJob, output: SyntheticOutput) -> Projection:
    """Keep the counts, not the padding."""
    content: JsonObject = {"executions": output.executions, "output_bytes": len(output.padding)}
    return Projection(
        artifacts=[
            Artifact(
                type=ARTIFACT_TYPE, artifact_id=artifact_id(job.job_id, ARTIFACT_TYPE, 0), ordinal=0, content=content
            )
        ]
    )
