"""`aijobs queues …`: what waits because somebody wants it to."""

from collections.abc import Sequence
from typing import Annotated

import typer

from aijobs.v1 import job_admin_service_pb2
from services.cli.job_text import clock
from services.cli.session import Session, session_of

app = typer.Typer(no_args_is_help=True, help="Look at the queues, pause and resume them. Needs the admin role.")

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue; see `aijobs queues list`.")]


@app.command("list")
def list_queues(context: typer.Context) -> None:
    """List the queues."""
    session = session_of(context)

    async def command() -> Sequence[job_admin_service_pb2.QueueInfo]:
        async with session.client() as client:
            return await client.list_queues()

    found = session.run(command)
    if session.output.machine:
        for queue in found:
            session.output.document(queue)
    else:
        rows = [
            (
                queue.queue,
                "paused" if queue.paused else "open",
                clock(queue.pause_time),
                queue.paused_by,
                queue.reason,
            )
            for queue in found
        ]
        session.output.table(("QUEUE", "STATE", "SINCE", "BY", "REASON"), rows)


@app.command()
def pause(
    context: typer.Context,
    queue: Queue,
    reason: Annotated[str, typer.Option("--reason", help="Words for those who find it paused.")] = "",
) -> None:
    """Start no more jobs of a queue. Those that run go on; new ones wait. Safe to repeat."""
    session = session_of(context)

    async def command() -> job_admin_service_pb2.QueueInfo:
        async with session.client() as client:
            return await client.pause_queue(queue, reason=reason)

    _show(session, session.run(command))


@app.command()
def resume(context: typer.Context, queue: Queue) -> None:
    """End the pause of a queue. Safe to repeat."""
    session = session_of(context)

    async def command() -> job_admin_service_pb2.QueueInfo:
        async with session.client() as client:
            return await client.resume_queue(queue)

    _show(session, session.run(command))


def _show(session: Session, queue: job_admin_service_pb2.QueueInfo) -> None:
    """Show a queue as it is, which need not be what was asked for: somebody else may have paused it first."""
    if session.output.machine:
        session.output.document(queue)
    elif queue.paused:
        since = f" since {clock(queue.pause_time)}" if queue.HasField("pause_time") else ""
        by = f" by {queue.paused_by}" if queue.paused_by else ""
        session.output.text(f"queue {queue.queue} is paused{since}{by}" + (f": {queue.reason}" if queue.reason else ""))
    else:
        session.output.text(f"queue {queue.queue} is open: its jobs are started")
