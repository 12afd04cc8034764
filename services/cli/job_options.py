"""Options of `aijobs jobs create` that have to be read before they can be sent."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer

from aijobs.canonical import NotStrictJson, parse
from aijobs.errors import InvalidInput
from services.cli.exits import CommandError, Exit


def input_json(text: str | None, file: str | None) -> str:
    """Return the input as JSON text, exactly as it was written.

    Raises:
        InvalidInput: no JSON.
        CommandError: the file cannot be read.
        typer.BadParameter: given twice.

    """
    if text is not None and file is not None:
        raise typer.BadParameter("give either --input or --input-file")
    if file is not None:
        try:
            text = sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_bytes().decode()
        except UnicodeDecodeError as error:
            raise InvalidInput.field("input", f"{file} is not UTF-8 text") from error
        except OSError as error:
            message = f"cannot read {file}: {error.strerror}"
            raise CommandError(message, advice="Name a file that can be read.", status=Exit.BAD_INPUT) from error
    if text is None:
        return "{}"
    try:
        parse(text)
    except NotStrictJson as error:
        raise InvalidInput.field("input", str(error)) from error
    return text


def labels(pairs: Sequence[str]) -> dict[str, str]:
    """Return labels by their keys.

    Raises:
        typer.BadParameter: not of the form K=V, or a key twice.

    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--label {pair!r} is not of the form K=V")
        if key in found:
            raise typer.BadParameter(f"--label {key!r} was given twice")
        found[key] = value
    return found


def run_at(text: str | None, delay: int | None) -> datetime | None:
    """Return when the job may start, in UTC; None for at once.

    Args:
        text: a time in ISO 8601.
        delay: seconds from now, by the clock of this machine.

    Raises:
        typer.BadParameter: no time, one without a zone, or both given.

    """
    if text is not None and delay is not None:
        raise typer.BadParameter("give either --run-at or --delay")
    if delay is not None:
        return datetime.now(UTC) + timedelta(seconds=delay)
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        if time.utcoffset() is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"--run-at {text!r} is no time in ISO 8601, which looks like 2026-12-24T18:00:00Z"
        ) from error
    # Taken for local time, it would mean something else on each machine.
    raise typer.BadParameter(f"--run-at {text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
