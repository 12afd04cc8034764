"""Secrets that are generated once and kept in a file of their owner."""

import os
import secrets
from pathlib import Path


def kept_secret(path: Path) -> str:
    """Return the secret in the file (mode 0600), or make one of 32 random bytes in hex."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        secret = secrets.token_hex(32)
        write_private(path, secret)
        return secret


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)
