"""Regular expressions in schemas that a caller sends, held to what cannot run away.

Python's matcher backtracks and holds the interpreter lock meanwhile: `^(a+)+$` against 40 letters stops every
heartbeat of the process. So patterns keep to the portable subset that JSON Schema recommends (2020-12 core, section
6.4: no look-around, no back-references), are matched against short texts only, and are refused when the number of
ways to match could be large. That number is estimated from the pattern alone:

    atom                1 way
    sequence            ways multiply, open repetitions add up
    a|b                 ways add up
    x{m,n}              the sum of ways^i for i from m to n
    x* x+ x{m,}         an open repetition: as many ways as the text is long; x itself must match in one way only
"""

import math
import re
from dataclasses import dataclass

LONGEST_PATTERN = 500
#: Longer texts are refused instead of matched.
LONGEST_MATCHED_TEXT = 1000
#: A few seconds of matching in the worst case; three open repetitions just fit.
MOST_STEPS = 2 * 10**8

# A bounded repetition with more room than this counts as open.
_ROOM = 64
_TOKEN = re.compile(
    r"""
    (?P<escape>\\.)
    | (?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    | (?P<open>\((?:\?:)?)
    | (?P<close>\))
    | (?P<choice>\|)
    | (?P<repeat>(?:[*+?]|\{(?P<low>\d+)?(?P<comma>,)?(?P<high>\d+)?(?<!\{)\})[?+]?)
    | (?P<atom>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Cost:
    ways: int = 1
    open: int = 0

    def then(self, other: "_Cost") -> "_Cost":
        return _bounded(_Cost(self.ways * other.ways, self.open + other.open))

    def either(self, other: "_Cost") -> "_Cost":
        return _bounded(_Cost(self.ways + other.ways, max(self.open, other.open)))

    def steps(self) -> int:
        # Open repetitions share one text, so their ends are in order: n^k / k! ways to choose them.
        return self.ways * int(LONGEST_MATCHED_TEXT**self.open) // math.factorial(self.open)


def _bounded(cost: _Cost) -> _Cost:
    if cost.steps() > MOST_STEPS:
        raise ValueError("the pattern could match in too many ways; use fewer *, + and | or close their bounds")
    return cost


@dataclass(slots=True)
class _Group:
    alternatives: _Cost | None
    before: _Cost
    last: _Cost

    @classmethod
    def empty(cls) -> "_Group":
        return cls(alternatives=None, before=_Cost(), last=_Cost())

    def add(self, atom: _Cost) -> None:
        self.before, self.last = self.before.then(self.last), atom

    def branch(self) -> None:
        self.alternatives, self.before, self.last = self.cost(), _Cost(), _Cost()

    def cost(self) -> _Cost:
        sequence = self.before.then(self.last)
        return sequence if self.alternatives is None else self.alternatives.either(sequence)


def check_pattern(pattern: str) -> None:
    """Refuse a pattern that is broken or could take for ever.

    Raises:
        ValueError: says what is wrong, without a path.

    """
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"the pattern is longer than {LONGEST_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    _check_cost(pattern)


def _check_cost(pattern: str) -> None:
    # A search that may start anywhere tries every start.
    groups = [_Group.empty()]
    if not pattern.startswith("^"):
        groups[0].add(_Cost(open=1))
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "open":
                if pattern.startswith("?", token.end()):
                    raise ValueError("look-around, named groups and flags are not supported")
                groups.append(_Group.empty())
            case "close":
                closed = groups.pop()
                groups[-1].add(closed.cost())
            case "choice":
                groups[-1].branch()
            case "repeat":
                groups[-1].last = _repeated(groups[-1].last, token)
            case "escape" if token[0][1] in "123456789":
                raise ValueError("back-references are not supported")
            case _:
                groups[-1].add(_Cost())
    groups[0].cost()


def _repeated(atom: _Cost, token: re.Match[str]) -> _Cost:
    low, high = _bounds(token)
    if high is None or high - low > _ROOM:
        if atom != _Cost():
            raise ValueError("what is repeated without a bound must not hold a repetition or a choice itself")
        return _Cost(open=1)
    if atom.open and high > 1:
        raise ValueError("what is repeated must not hold a repetition without a bound")
    if atom.ways == 1:
        return _bounded(_Cost(high - low + 1, atom.open))
    total = sum(atom.ways**count for count in range(low, min(high, _ROOM) + 1))
    return _bounded(_Cost(max(total, atom.ways ** min(high, _ROOM)), atom.open))


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    match token[0][0]:
        case "*":
            return 0, None
        case "+":
            return 1, None
        case "?":
            return 0, 1
    low = int(token["low"] or 0)
    if token["comma"] is None:
        return low, low
    return low, int(token["high"]) if token["high"] else None
