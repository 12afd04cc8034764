"""What a run may spend: explicit limits, and updates that happen whole or not at all (HA-5).

Calls are reserved before they are made. Tokens are known only afterwards, so they are recorded first, whatever they
come to, and then the breach is raised: money that is spent must not be missing from the count.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from pydantic import JsonValue

from aijobs import canonical
from aijobs.harness.capacity import CapacityExceeded, RunCapacity


class BudgetExceeded(Exception):
    """A limit of the run is reached.

    Attributes:
        limit: name of the limit, a field of `RunBudgetLimits`.
        message: what was wanted and what is allowed.

    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(f"{limit}: {message}")
        self.limit = limit
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBudgetLimits:
    """What a run may use. There are no defaults: whoever starts runs says what they may cost.

    Attributes:
        model_calls: calls of models.
        tool_calls: calls of tools, all together.
        tool_calls_per_tool: calls of one tool.
        input_tokens: tokens sent to models.
        output_tokens: tokens received from models.
        total_tokens: both together.
        run_bytes: UTF-8 bytes of JSON that the run may keep.

    Raises:
        ValueError: a limit is not a positive integer; names every such field.

    """

    model_calls: int
    tool_calls: int
    tool_calls_per_tool: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    run_bytes: int

    def __post_init__(self) -> None:
        wrong = [field.name for field in fields(self) if not _is_positive(getattr(self, field.name))]
        if wrong:
            raise ValueError(f"not a positive integer: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """What a run has used."""

    model_calls: int
    tool_calls: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    run_bytes: int

    @property
    def total_tokens(self) -> int:
        """Tokens sent and received."""
        return self.input_tokens + self.output_tokens


class RunBudget:
    """Limits of one run and what it has used of them. May be used from any thread."""

    def __init__(self, limits: RunBudgetLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._capacity = RunCapacity(limits.run_bytes)
        self._model_calls = 0
        self._tool_calls: Counter[str] = Counter()
        self._input_tokens = 0
        self._output_tokens = 0

    @property
    def usage(self) -> RunUsage:
        """What is used so far."""
        with self._lock:
            return RunUsage(
                model_calls=self._model_calls,
                tool_calls=MappingProxyType(dict(self._tool_calls)),
                input_tokens=self._input_tokens,
                output_tokens=self._output_tokens,
                run_bytes=self._capacity.used,
            )

    def reserve_model_call(self) -> None:
        """Count a model call that is about to be made.

        Raises:
            BudgetExceeded: there is none left, or no token is; nothing was counted.

        """
        with self._lock:
            _require("model_calls", self._model_calls + 1, self.limits.model_calls)
            # A call needs at least a token each way.
            self._require_tokens(self._input_tokens + 1, self._output_tokens + 1)
            self._model_calls += 1

    def reserve_tool_call(self, tool: str) -> None:
        """Count a tool call that is about to be made, for the tool and for all of them.

        Raises:
            BudgetExceeded: there is none left; neither was counted.

        """
        with self._lock:
            _require("tool_calls", self._tool_calls.total() + 1, self.limits.tool_calls)
            _require("tool_calls_per_tool", self._tool_calls[tool] + 1, self.limits.tool_calls_per_tool, of=tool)
            self._tool_calls[tool] += 1

    def record_tokens(self, *, input_tokens: int, output_tokens: int) -> None:
        """Record what a model call really used.

        Raises:
            ValueError: a count is negative; nothing was recorded.
            BudgetExceeded: the run has now used more than it may; all of it was recorded.

        """
        if input_tokens < 0 or output_tokens < 0:
            raise ValueError(f"tokens must not be negative: {input_tokens} and {output_tokens}")
        with self._lock:
            self._input_tokens += input_tokens
            self._output_tokens += output_tokens
            self._require_tokens(self._input_tokens, self._output_tokens)

    def reserve_bytes(self, value: JsonValue) -> int:
        """Take the bytes that a value has as canonical JSON in UTF-8, and return how many they are.

        Raises:
            NotStrictJson: the value is no JSON.
            BudgetExceeded: they do not fit; none was taken.

        """
        size = len(canonical.dump(value).encode())
        try:
            self._capacity.reserve(size)
        except CapacityExceeded as error:
            raise BudgetExceeded("run_bytes", str(error)) from error
        return size

    def _require_tokens(self, input_tokens: int, output_tokens: int) -> None:
        _require("input_tokens", input_tokens, self.limits.input_tokens)
        _require("output_tokens", output_tokens, self.limits.output_tokens)
        _require("total_tokens", input_tokens + output_tokens, self.limits.total_tokens)


def _require(limit: str, wanted: int, allowed: int, *, of: str = "") -> None:
    if wanted > allowed:
        raise BudgetExceeded(limit, f"{wanted} wanted{f' of {of}' if of else ''}, {allowed} allowed")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
