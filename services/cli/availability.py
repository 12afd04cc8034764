"""`aijobs platform …`: whether jobs can be created."""

from typing import Annotated

import typer

from aijobs.v1 import job_admin_service_pb2
from services.cli.job_text import clock
from services.cli.session import Session, session_of

app = typer.Typer(no_args_is_help=True, help="Switch the creation of jobs on and off. Needs the admin role.")

Reason = Annotated[str, typer.Option("--reason", help="Words for callers who are refused. Public.")]


@app.command()
def show(context: typer.Context) -> None:
    """Show whether jobs can be created."""
    session = session_of(context)

    async def command() -> job_admin_service_pb2.PlatformAvailability:
        async with session.client() as client:
            return await client.platform_availability()

    _show(session, session.run(command))


@app.command("on")
def switch_on(context: typer.Context, reason: Reason = "") -> None:
    """Let jobs be created. Safe to repeat."""
    _switch(session_of(context), available=True, reason=reason)


@app.command("off")
def switch_off(context: typer.Context, reason: Reason = "") -> None:
    """Refuse to create jobs. Those that exist go on. Safe to repeat."""
    _switch(session_of(context), available=False, reason=reason)


def _switch(session: Session, *, available: bool, reason: str) -> None:
    async def command() -> job_admin_service_pb2.PlatformAvailability:
        async with session.client() as client:
            return await client.set_platform_availability(available, reason=reason)

    _show(session, session.run(command))


def _show(session: Session, platform: job_admin_service_pb2.PlatformAvailability) -> None:
    if session.output.machine:
        session.output.document(platform)
        return
    words = "jobs can be created" if platform.available else "no jobs can be created"
    if platform.changed_by:
        when = f" at {clock(platform.change_time)}" if platform.HasField("change_time") else ""
        words += f"; {platform.changed_by} switched that {'on' if platform.available else 'off'}{when}"
    session.output.text(words + (f": {platform.reason}" if platform.reason else ""))
