"""Documents that are generated from code: how they are written and how they are checked."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, ending in a line break."""
    lines = [head, ["---"] * len(head), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_or_check(page: Path, text: str, *, about: str | None) -> int:
    """Write a page, or with `--check` on the command line only compare it; returns the exit status.

    Args:
        page: the file.
        text: what it must hold.
        about: description for `--help`.

    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args().check:
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            return 0
        print(f"{page.relative_to(ROOT)} is out of date: run make docs", file=sys.stderr)
        return 1
    page.write_text(text, encoding="utf-8")
    return 0
