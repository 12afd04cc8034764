"""Commands that are about this machine: migrate, token, dev and demo.

What they start is imported only when they run, so that the client part needs neither database nor services.
"""

import importlib
import os
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from aijobs.errors import AijobsError
from aijobs.rpc.auth import mint_token
from aijobs.rpc.roles import Role
from services.cli.exits import CommandError, Exit
from services.cli.session import session_of


def migrate(
    context: typer.Context,
    database_url: Annotated[
        str, typer.Option(envvar="AIJOBS_DATABASE_URL", show_envvar=True, help="The database to bring up to date.")
    ],
) -> None:
    """Bring the database's tables up to date. Safe to repeat."""
    output = session_of(context).output
    upgrade = _part("services.jobs.migrate", "jobs").upgrade
    try:
        revisions: list[str] = upgrade(database_url)
    except AijobsError:
        raise
    except Exception as error:  # drivers and Alembic raise whatever they like; the reader needs one sentence
        advice = "Check AIJOBS_DATABASE_URL, that the database server runs, and that its user may create tables."
        reason = _without_password(f"{type(error).__name__}: {error}".splitlines()[0], database_url)
        raise CommandError(f"the migration failed: {reason}", advice=advice, status=Exit.UNAVAILABLE) from error
    if output.machine:
        output.document({"applied": revisions})
    elif revisions:
        output.text(f"applied {', '.join(revisions)}")
    else:
        output.text("the database is up to date")


def token(
    context: typer.Context,
    role: Annotated[list[Role], typer.Option("--role", help="What its bearer may do; may be repeated.")],
    subject: Annotated[str, typer.Option("--subject", help="Who its bearer is; the user id for the role user.")],
    hours: Annotated[float, typer.Option("--hours", min=0.01, max=24 * 365, help="How long it holds.")] = 12,
) -> None:
    """Make a token for development from AIJOBS_TOKEN_SECRET."""
    output = session_of(context).output
    try:
        secret = os.environ.get("AIJOBS_TOKEN_SECRET", "")
        made = mint_token(secret, subject=subject, roles=role, lifetime=timedelta(hours=hours))
    except ValueError as error:
        advice = "Set AIJOBS_TOKEN_SECRET to the same secret as the services."
        raise CommandError(str(error), advice=advice, status=Exit.BAD_INPUT) from error
    if output.machine:
        output.document({"token": made, "subject": subject, "roles": [*role]})
    else:
        output.raw(made)


def dev() -> None:
    """Run the whole engine in this process until Ctrl-C: SQLite, in-memory broker, gRPC on loopback."""
    _end(_part("services.standalone.dev", "all").run())


def demo() -> None:
    """Run one real job from end to end in this process and show it. Exits 0 only if the job succeeded."""
    _end(_part("services.standalone.demo", "all").run())


def _part(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"this installation has no {error.name}",
            advice=f"Install the services with it: pip install 'aijobs-server[{extra}]'.",
            status=Exit.BAD_INPUT,
        ) from error


def _without_password(text: str, database_url: str) -> str:
    try:
        password = urlsplit(database_url).password
    except ValueError:
        password = None
    text = text.replace(database_url, "the database")
    return text.replace(password, "***") if password else text


def _end(status: int | None) -> None:
    if status:
        raise typer.Exit(status)
