"""Printing figures."""

import json
import platform
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import make_engine, own_rabbitmq

__all__ = ["make_engine", "own_rabbitmq"]

Report = Callable[..., None]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Print one figure as a JSON line, with what it was measured under."""

    def say(figure: str, value: float, unit: str, **under: Any) -> None:
        with capsys.disabled():
            line = {
                "figure": figure,
                "value": round(value, 2),
                "unit": unit,
                **under,
                "python": platform.python_version(),
            }
            print(json.dumps(line), flush=True)  # noqa: T201 - this is what it is for

    return say


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that is not below this share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
