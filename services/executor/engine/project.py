"""PROJECT: map the validated output to what the job leaves behind; the jobs service commits it (PJ-1, PJ-2)."""

from aijobs import canonical
from aijobs.failures import ExecutionFailed
from aijobs.job_type import ProjectedJob, Projection
from services.executor.engine.execute import Executed
from services.executor.engine.outcomes import ProjectedArtifact, Succeeded
from services.executor.handlers import HandlerLoop


class Project:
    """The stage. Projectors are somebody's code: they run where handlers run."""

    def __init__(self, handlers: HandlerLoop) -> None:
        self._handlers = handlers

    async def __call__(self, executed: Executed) -> Succeeded:
        """Project an output.

        Raises:
            ExecutionFailed: `INTERNAL_PROJECTOR_ERROR`.

        """
        try:
            projection = await self._handlers.run(lambda: _projection(executed), "projector")
            artifacts = [
                ProjectedArtifact(
                    type=artifact.type,
                    artifact_id=artifact.artifact_id,
                    ordinal=artifact.ordinal,
                    content_json=canonical.dump(artifact.content),
                )
                for artifact in projection.artifacts
            ]
        except Exception as error:
            raise ExecutionFailed("INTERNAL_PROJECTOR_ERROR", type(error).__name__) from error
        return Succeeded(output_json=executed.output_json, output_hash=executed.output_hash, artifacts=artifacts)


async def _projection(executed: Executed) -> Projection:
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
