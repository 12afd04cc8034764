"""The bounds that a schema sets to a figure."""

import math
import sys
from dataclasses import dataclass
from typing import Self

from aijobs.canonical import LARGEST_INTEGER, JsonObject
from aijobs.schema_walk import Place
from services.executor.gateway.offline.subset import number, unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Inclusive bounds; None where the schema leaves a side open."""

    low: float | None
    high: float | None

    @classmethod
    def of_number(cls, schema: JsonObject, place: Place) -> Self:
        """Read the bounds of a number.

        Raises:
            ExecutionFailed: `UNSUPPORTED_SCHEMA`: they leave no number.

        """
        above, below = number(schema, "exclusiveMinimum"), number(schema, "exclusiveMaximum")
        return cls._narrowest(
            lows=(number(schema, "minimum"), None if above is None else math.nextafter(above, math.inf)),
            highs=(number(schema, "maximum"), None if below is None else math.nextafter(below, -math.inf)),
            place=place,
        )

    @classmethod
    def of_integer(cls, schema: JsonObject, place: Place) -> Self:
        """Read the bounds of an integer; what JSON carries exactly (ruling 35) is one of them.

        Raises:
            ExecutionFailed: `UNSUPPORTED_SCHEMA`: they leave no integer.

        """
        low, high = number(schema, "minimum"), number(schema, "maximum")
        above, below = number(schema, "exclusiveMinimum"), number(schema, "exclusiveMaximum")
        return cls._narrowest(
            lows=(
                None if low is None else max(math.ceil(low), -LARGEST_INTEGER),
                None if above is None else max(math.floor(above) + 1, -LARGEST_INTEGER),
            ),
            highs=(
                None if high is None else min(math.floor(high), LARGEST_INTEGER),
                None if below is None else min(math.ceil(below) - 1, LARGEST_INTEGER),
            ),
            place=place,
            limit=LARGEST_INTEGER,
        )

    @classmethod
    def _narrowest(
        cls,
        *,
        lows: tuple[float | None, ...],
        highs: tuple[float | None, ...],
        place: Place,
        limit: float = sys.float_info.max,
    ) -> Self:
        low = max((bound for bound in lows if bound is not None), default=None)
        high = min((bound for bound in highs if bound is not None), default=None)
        if low is not None and high is not None and low > high:
            raise unsupported(place, "minimum", "leaves nothing below the maximum")
        if (low is not None and low > limit) or (high is not None and high < -limit):
            raise unsupported(place, "minimum" if low else "maximum", "leaves no number that JSON carries exactly")
        return cls(low=low, high=high)

    def held(self, value: float) -> float:
        """Bring a value within the bounds."""
        if self.low is not None:
            value = max(value, self.low)
        return value if self.high is None else min(value, self.high)

    def closed(self, width: int) -> tuple[float, float]:
        """Close open sides, for something that has no figure of its own: 0 to `width`, moved to where it fits."""
        low = min(0, 0 if self.high is None else self.high - width) if self.low is None else self.low
        return low, max(width, low + width) if self.high is None else self.high
