"""Where the answers of commands go: rich text for people, one JSON document a line for programs."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Wide enough that nothing is cut when the output goes into a file or a pipe.
_PIPE_WIDTH = 10_000


class OutputClosedError(Exception):
    """Whoever read our output went away. No OSError: typer would exit with 1, which means something else here."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Let `main` end the process."""
        raise OutputClosedError


class Output:
    """The output of one command.

    Args:
        machine: write JSON lines instead of text.

    """

    def __init__(self, *, machine: bool) -> None:
        self.machine = machine
        self.console = _console(sys.stdout)
        self._errors = _console(sys.stderr)

    @property
    def live(self) -> bool:
        """True if there is a terminal to draw on."""
        return self.console.is_terminal and not self.machine

    def document(self, document: Message | Mapping[str, Any]) -> None:
        """Write one JSON document on one line. Messages take their proto JSON form with the names of the contract."""
        fields = document_of(document) if isinstance(document, Message) else document
        self.raw(json.dumps(fields, ensure_ascii=False))

    def text(self, text: str, style: str = "") -> None:
        """Write a line. The text may come from anybody: it is neither markup nor may it steer the terminal."""
        self.console.print(Text(printable(text), style=style), soft_wrap=True)

    def fields(self, fields: Mapping[str, str]) -> None:
        """Write names and values, one a line, without the empty ones."""
        width = max(map(len, fields), default=0)
        for name, value in fields.items():
            if value:
                line = Text(f"{name:<{width}}  ", style="dim") + Text(printable(value), style="")
                self.console.print(line, soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table, plain when it goes into a pipe."""
        table = Table(*headings, box=None, pad_edge=False, header_style="bold" if self.live else "")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        self.console.print(table)

    def raw(self, text: str) -> None:
        """Write a text as it is, for programs to read."""
        try:
            print(text, flush=True)
        except BrokenPipeError as error:
            raise OutputClosedError from error

    def json_layout(self, text: str) -> None:
        """Write JSON laid out over lines, coloured on a terminal."""
        laid_out = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        if self.console.is_terminal:
            self.console.print_json(printable(laid_out))
        else:
            self.raw(laid_out)

    def json_text(self, text: str) -> None:
        """Write JSON: laid out for people, as it is for programs."""
        if self.machine or not self.console.is_terminal:
            self.raw(text)
        else:
            self.json_layout(text)

    def error(self, message: str, *, advice: str, details: Mapping[str, Any]) -> None:
        """Write what went wrong and what to do next, on stderr.

        Args:
            message: one sentence.
            advice: one sentence.
            details: what programs get besides.

        """
        if self.machine:
            document = {"error": {"message": message, "advice": advice, **details}}
            print(json.dumps(document, ensure_ascii=False), file=sys.stderr, flush=True)
            return
        self._errors.print(Text("error: ", style="bold red") + Text(printable(message), style=""), soft_wrap=True)
        if advice:
            self._errors.print(Text(printable(advice)), soft_wrap=True)

    def note(self, text: str) -> None:
        """Write a remark on stderr, for people only."""
        if not self.machine:
            self._errors.print(Text(printable(text), style="dim"), soft_wrap=True)


def document_of(message: Message) -> dict[str, Any]:
    """Return the proto JSON form of a message, every plain field present, names as in the contract."""
    document: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def printable(text: str) -> str:
    """Return a text with its control characters made visible: they could rewrite the screen of who reads it."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _console(file: Any) -> Console:
    width = None if file.isatty() else _PIPE_WIDTH
    return _Console(file=file, width=width, highlight=False, markup=False, emoji=False)
