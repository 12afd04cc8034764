"""`aijobs executors …`: which ones there are, and how one is emptied."""

from collections.abc import Sequence
from typing import Annotated

import typer

from aijobs.v1 import job_admin_service_pb2
from services.cli.job_text import clock
from services.cli.session import session_of

app = typer.Typer(no_args_is_help=True, help="Look at the executors and drain them. Needs the admin role.")


@app.command("list")
def list_executors(context: typer.Context) -> None:
    """List the executors that were seen within the last day, the latest one first."""
    session = session_of(context)

    async def command() -> Sequence[job_admin_service_pb2.Executor]:
        async with session.client() as client:
            return await client.list_executors()

    found = session.run(command)
    if session.output.machine:
        for executor in found:
            session.output.document(executor)
    elif found:
        rows = [
            (
                executor.executor_id,
                _state(executor),
                executor.version,
                str(executor.running),
                ", ".join(f"{load.queue} {load.free_slots} of {load.slots} free" for load in executor.queues),
                clock(executor.last_seen_time),
            )
            for executor in found
        ]
        session.output.table(("EXECUTOR", "STATE", "VERSION", "RUNS", "QUEUES", "SEEN"), rows)
    else:
        session.output.note("no executor was seen within the last day")


@app.command()
def drain(
    context: typer.Context,
    executor_id: Annotated[str, typer.Argument(metavar="ID", help="The executor; see `aijobs executors list`.")],
) -> None:
    """Tell an executor to take no more jobs. What it runs goes on to its end. Safe to repeat."""
    session = session_of(context)

    async def command() -> job_admin_service_pb2.Executor:
        async with session.client() as client:
            return await client.drain_executor(executor_id)

    executor = session.run(command)
    if session.output.machine:
        session.output.document(executor)
    elif executor.state == job_admin_service_pb2.EXECUTOR_STATE_CONNECTED:
        left = f"it still runs {executor.running}" if executor.running else "it runs none"
        session.output.text(f"executor {executor_id} takes no more jobs; {left}")
    else:
        # It cannot have heard of it.
        session.output.text(f"executor {executor_id} is {_word(executor.state)}; should it come back, it takes no jobs")


def _state(executor: job_admin_service_pb2.Executor) -> str:
    return _word(executor.state) + (", draining" if executor.HasField("drain_time") else "")


def _word(state: "job_admin_service_pb2.ExecutorState.ValueType") -> str:
    known = state in job_admin_service_pb2.ExecutorState.values()
    name = job_admin_service_pb2.ExecutorState.Name(state) if known else f"state {int(state)}"
    return name.removeprefix("EXECUTOR_STATE_").lower()
