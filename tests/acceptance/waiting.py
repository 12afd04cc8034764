"""Waiting for what sends no signal: rows, log files, ports."""

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

WITHIN = timedelta(seconds=20)
_PAUSE_SECONDS = 0.02


async def until(look: Callable[[], Any], what: str, *, within: timedelta = WITHIN) -> None:
    """Look again and again until there is something true to see; `look` may be asynchronous."""
    try:
        async with asyncio.timeout(within.total_seconds()):
            while True:
                seen = look()
                if inspect.isawaitable(seen):
                    seen = await seen
                if seen:
                    return
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"not within {within.total_seconds():g} s: {what}") from error
