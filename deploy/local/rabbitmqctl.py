"""Running `rabbitmqctl` on a private node."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from deploy.local.guarded import GuardedProcess, ProcessFailedError
from deploy.local.lifeline import Lifeline

#: It starts an Erlang machine each time: seconds on a busy computer.
WITHIN = timedelta(minutes=1)


async def control(
    program: Path, arguments: Sequence[str], *, environment: Mapping[str, str], folder: Path, lifeline: Lifeline
) -> str:
    """Run it and return what it printed.

    Args:
        program: `rabbitmqctl`.
        arguments: a command and what it takes.
        environment: the node's own.
        folder: where it runs.
        lifeline: what it hangs on.

    Raises:
        ProcessFailedError: it failed, or took more than a minute.

    """
    output = folder / f"control-{uuid4().hex}.log"
    process = await GuardedProcess.start(
        [str(program), "--quiet", *arguments], lifeline=lifeline, log=output, environment=environment, folder=folder
    )
    try:
        async with asyncio.timeout(WITHIN.total_seconds()):
            status = await process.wait()
    except TimeoutError as error:
        raise ProcessFailedError(f"rabbitmqctl {arguments[0]} took more than {WITHIN}") from error
    finally:
        await process.kill()
    said = output.read_text(encoding="utf-8", errors="replace")
    output.unlink()
    if status:
        raise ProcessFailedError(f"rabbitmqctl {arguments[0]} failed\n{said}")
    return said
