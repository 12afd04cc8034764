"""Exploring one setting, and telling how much that was (`pytest -s`, or `-rP`)."""

import time

from tests.model.explorer import Exploration, Explorer
from tests.model.protocol import LeaseProtocol
from tests.model.setting import Setting


def explore(title: str, setting: Setting) -> Exploration:
    """Visit every state of a setting."""
    begun = time.perf_counter()
    found = Explorer(LeaseProtocol(setting)).explore()
    print(f"\n{title}: {time.perf_counter() - begun:.1f} s, {found}")  # noqa: T201 - the report of a run
    return found
