"""PROJECT: map the validated output to what the job leaves behind; the jobs service commits it (PJ-1, PJ-2)."""

from aijobs.failures import ExecutionFailed
from services.executor.engine.resolve import Resolved
from services.executor.hosts.port import Output
from services.executor.outcomes import Succeeded

#: What the jobs service takes of one job: output and projection together.
LARGEST_RESULT = 2 * 1024 * 1024


class Project:
    """The stage."""

    async def __call__(self, resolved: Resolved, output: Output) -> Succeeded:
        """Project an output.

        Raises:
            ExecutionFailed: `INTERNAL_PROJECTOR_ERROR`, `INTERNAL_RESULT_TOO_LARGE`.

        """
        projected = await resolved.host.project(resolved.begun.facts)
        texts = [output.text]
        texts += [artifact.content_json for artifact in projected.artifacts]
        texts += [follow_up.input_json for follow_up in projected.follow_ups]
        texts += [row.content_json for row in projected.rows]
        size = sum(len(text.encode()) for text in texts)
        if size > LARGEST_RESULT:
            raise ExecutionFailed(
                "INTERNAL_RESULT_TOO_LARGE", f"{size} bytes with its projection; at most {LARGEST_RESULT}"
            )
        return Succeeded(
            output_json=output.text,
            output_hash=output.hash,
            artifacts=projected.artifacts,
            follow_ups=projected.follow_ups,
            rows=projected.rows,
        )
