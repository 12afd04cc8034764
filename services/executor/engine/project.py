"""PROJECT: map the validated output to what the job leaves behind; the jobs service commits it (PJ-1, PJ-2)."""

from aijobs import canonical
from aijobs.failures import ExecutionFailed
from aijobs.identifiers import is_identifier
from aijobs.job_type import Artifact, ProjectedJob, Projection
from aijobs.logs import place_of
from services.executor.engine.execute import Executed
from services.executor.handlers import HandlerLoop
from services.executor.outcomes import ProjectedArtifact, Succeeded

#: What the jobs service takes of one job: output and contents together, and artifacts.
LARGEST_RESULT = 2 * 1024 * 1024
LONGEST_TYPE = 64
HIGHEST_ORDINAL = 2**31 - 1


class Project:
    """The stage. Projectors are somebody's code: they run where handlers run."""

    def __init__(self, handlers: HandlerLoop) -> None:
        self._handlers = handlers

    async def __call__(self, executed: Executed) -> Succeeded:
        """Project an output.

        Raises:
            ExecutionFailed: `INTERNAL_PROJECTOR_ERROR`, `INTERNAL_RESULT_TOO_LARGE`.

        """
        return await self._handlers.run(lambda: _projected(executed), "projector")


async def _projected(executed: Executed) -> Succeeded:
    try:
        artifacts = [_checked(artifact) for artifact in _projection(executed).artifacts]
    except Exception as error:
        raise ExecutionFailed("INTERNAL_PROJECTOR_ERROR", place_of(error)) from error
    size = len(executed.output_json.encode()) + sum(len(artifact.content_json.encode()) for artifact in artifacts)
    if size > LARGEST_RESULT:
        raise ExecutionFailed("INTERNAL_RESULT_TOO_LARGE", f"{size} bytes with its artifacts; at most {LARGEST_RESULT}")
    return Succeeded(output_json=executed.output_json, output_hash=executed.output_hash, artifacts=artifacts)


def _projection(executed: Executed) -> Projection:
    resolved = executed.resolved
    if resolved.handler.project is None:
        return Projection()
    job = ProjectedJob(
        job_id=resolved.leased.lease.job_id,
        job_type=resolved.leased.job_type,
        user_id=resolved.leased.user_id,
        input=resolved.input,
    )
    return resolved.handler.project(job, executed.output)


def _checked(artifact: Artifact) -> ProjectedArtifact:
    """Refuse here, by the projector's name, what the jobs service would refuse."""
    if not (is_identifier(artifact.type, most=LONGEST_TYPE) and is_identifier(artifact.artifact_id)):
        raise ValueError("type or id of an artifact is no identifier")
    if not 0 <= artifact.ordinal <= HIGHEST_ORDINAL:
        raise ValueError("ordinal of an artifact is out of range")
    return ProjectedArtifact(
        type=artifact.type,
        artifact_id=artifact.artifact_id,
        ordinal=artifact.ordinal,
        content_json=canonical.dump(artifact.content),
    )
