"""`aijobs`: the command line of the engine. Also `python -m services.cli`."""

import os
import sys
import traceback
from typing import Annotated

import typer

from aijobs.errors import AijobsError
from services.cli import availability, consistency, engine, executors, job_types, jobs, outbox, queues
from services.cli.exits import HELP, CommandError, Exit, exit_of
from services.cli.output import Output, OutputClosedError
from services.cli.session import DEFAULT_ADDRESS, Session

app = typer.Typer(
    name="aijobs",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The command line of the aijobs engine.",
    epilog=HELP,
)
for name, group in (
    ("jobs", jobs),
    ("executors", executors),
    ("queues", queues),
    ("outbox", outbox),
    ("platform", availability),
):
    app.add_typer(group.app, name=name)
for command in (job_types.types, consistency.check, engine.migrate, engine.token, engine.dev, engine.demo):
    app.command()(command)


@app.callback()
def program(
    context: typer.Context,
    address: Annotated[
        str, typer.Option("--address", envvar="AIJOBS_ADDRESS", help="The jobs service, as host:port.")
    ] = DEFAULT_ADDRESS,
    machine: Annotated[
        bool, typer.Option("--json", help="JSON for programs, one document a line; errors too, on stderr.")
    ] = False,
) -> None:
    """Ask the jobs service at AIJOBS_ADDRESS, with the token in AIJOBS_TOKEN."""
    context.obj = Session(address=address, output=Output(machine=machine))


def main() -> None:
    """Run the program and exit with its status."""
    _have_outputs()
    arguments = _json_first(sys.argv[1:])
    output = Output(machine="--json" in arguments[:1])
    try:
        status = _run(arguments, output)
    except OutputClosedError:
        # Python flushes once more when it ends and would complain; there is nobody to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = Exit.OUTPUT_CLOSED
    sys.exit(status)


def _run(arguments: list[str], output: Output) -> int:  # noqa: PLR0911 - one for each way to end
    try:
        _require_text(arguments)
        return int(app(arguments, prog_name="aijobs", standalone_mode=False) or 0)
    except OutputClosedError:
        raise
    except AijobsError as error:
        violations = [{"field": v.field, "description": v.description} for v in error.violations]
        quotas = [{"subject": v.subject, "description": v.description} for v in error.quota_violations]
        details = {
            "reason": error.reason,
            "status": error.status.name,
            "violations": violations,
            "quota_violations": quotas,
        }
        output.error(error.message, advice=error.advice, details=details)
        return exit_of(error)
    except CommandError as error:
        output.error(error.message, advice=error.advice, details={"reason": error.status.name})
        return error.status
    except typer.TyperException as error:
        message = error.format_message()
        if message:  # a command without arguments has shown its help instead
            output.error(message, advice="See `aijobs --help`.", details={"reason": Exit.BAD_INPUT.name})
        return Exit.BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - nobody wants to read a traceback; where it was is enough for a report
        if isinstance(error, OSError):
            output.error(
                f"cannot read or write: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""),
                advice="Check the file, the folder or the space that is left.",
                details={"reason": Exit.CANNOT_WRITE.name},
            )
            return Exit.CANNOT_WRITE
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"unexpected {type(error).__name__} in {place.name} (line {place.lineno}): {error}"
        output.error(message, advice="This is a bug: report it with the command.", details={"reason": Exit.BUG.name})
        return Exit.BUG


def _have_outputs() -> None:
    """Give the program somewhere to write to when it was started with its outputs closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - as long as the process lives


def _require_text(arguments: list[str]) -> None:
    """Refuse arguments with bytes that the terminal's encoding does not know; Python passes them as surrogates."""
    if any("\udc80" <= character <= "\udcff" for argument in arguments for character in argument):
        raise CommandError(
            "an argument is no valid UTF-8", advice="Check your terminal's encoding.", status=Exit.BAD_INPUT
        )


def _json_first(arguments: list[str]) -> list[str]:
    """Let `--json` stand anywhere, since it is about the whole program."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    if "--json" not in options:
        return arguments
    return ["--json", *(argument for argument in options if argument != "--json"), *rest]


if __name__ == "__main__":
    main()
