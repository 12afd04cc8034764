"""Ids and keys: printable ASCII without blanks, so that no database takes two of them for one (ruling 15)."""

import re

LONGEST = 128
_IDENTIFIER = re.compile(r"[!-~]+")


def is_identifier(value: str, *, least: int = 1, most: int = LONGEST) -> bool:
    """Tell whether a text can be an id or a key of `least` to `most` characters."""
    return least <= len(value) <= most and _IDENTIFIER.fullmatch(value) is not None


def rule(*, least: int = 1, most: int = LONGEST) -> str:
    """Say what `is_identifier` asks for, for an error message."""
    return f"must be {least} to {most} printable ASCII characters without blanks"
