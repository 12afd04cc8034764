"""A breadth-first explorer of everything that a protocol can do; it knows nothing of jobs.

A protocol says how it starts, which steps lead on from a state, what is wrong with a state, and when it is done. The
explorer visits every reachable state, once for all states that are the same but for names (`normal`). It finds

- the shortest way to a state in which something is wrong,
- a dead end: a state that is not done and from which nothing goes on by itself,
- a loop: states that are not done and that may follow each other for ever.

For the last two it looks only at steps that need no fault: once faults stop, every run has to end by itself, whatever
the order of its steps. No fairness is assumed.
"""

import gc
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

StateT = TypeVar("StateT")


class Step(NamedTuple, Generic[StateT]):
    """One thing that can happen. `forced`: it also may not, so nobody can rely on it: a fault, or somebody's wish."""

    label: str
    forced: bool
    after: StateT


class Explorable(Protocol[StateT]):
    """What can be explored."""

    def start(self) -> StateT:
        """Return the state in which everything begins."""
        ...

    def steps(self, state: StateT) -> Iterator[Step[StateT]]:
        """Return everything that can happen next."""
        ...

    def normal(self, state: StateT) -> StateT:
        """Return the one state that stands for all that differ from it in names only."""
        ...

    def wrong(self, state: StateT) -> str:
        """Say what is wrong with a state; empty if nothing is."""
        ...

    def done(self, state: StateT) -> bool:
        """Tell whether everything that must happen has happened."""
        ...


@dataclass(slots=True)
class Exploration:
    """What was found. `problem` is empty if nothing was; `trace` leads to it."""

    states: int = 0
    steps: int = 0
    problem: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = [f"{self.states} states, {self.steps} steps: {self.problem or 'nothing wrong'}"]
        return "\n".join([*found, *(f"  {number:2}. {label}" for number, label in enumerate(self.trace, 1))])


class Explorer(Generic[StateT]):
    """Explores one protocol; `most_states` is a brake for models that turn out to have no end."""

    def __init__(self, protocol: Explorable[StateT], *, most_states: int = 5_000_000) -> None:
        self._protocol = protocol
        self._most_states = most_states
        self._states: list[StateT] = []
        self._number: dict[StateT, int] = {}
        #: From where a state was reached first.
        self._parent = array("q")
        #: Steps that are not forced: of state n those from edges_from[n] to edges_from[n + 1].
        self._edges_from = array("q", [0])
        self._edges = array("q")

    def explore(self) -> Exploration:
        """Visit every state, or stop at the first one in which something is wrong."""
        # Millions of tuples without a cycle among them: looking for cycles would take half of the time.
        gc.disable()
        try:
            return self._explore()
        finally:
            gc.enable()

    def _explore(self) -> Exploration:
        found = Exploration()
        self._reach(self._protocol.normal(self._protocol.start()), -1)
        present = 0
        while present < len(self._states):
            if problem := self._protocol.wrong(self._states[present]):
                found.problem, found.trace = problem, self._trace(self._path(present))
                break
            found.steps += self._go_on(present)
            present += 1
        else:
            self._look_for_dead_ends(found)
        found.states = len(self._states)
        return found

    def _reach(self, state: StateT, parent: int) -> int:
        number = self._number.setdefault(state, len(self._states))
        if number == len(self._states):
            if number == self._most_states:
                raise OverflowError(f"more than {number} states")
            self._states.append(state)
            self._parent.append(parent)
        return number

    def _go_on(self, present: int) -> int:
        protocol, steps = self._protocol, 0
        for step in protocol.steps(self._states[present]):
            after = self._number.get(step.after)
            if after is None:
                after = self._reach(protocol.normal(step.after), present)
            if after == present:
                # Nothing has changed: a heartbeat, a look that found nothing.
                continue
            steps += 1
            if not step.forced:
                self._edges.append(after)
        self._edges_from.append(len(self._edges))
        return steps

    def _look_for_dead_ends(self, found: Exploration) -> None:
        undone = [not self._protocol.done(state) for state in self._states]
        for number in range(len(self._states)):
            if undone[number] and not self._following(number):
                found.problem = "dead end: nothing goes on by itself"
                found.trace = self._trace(self._path(number))
                return
        if loop := self._loop(undone):
            found.problem = "loop: it may go on for ever"
            found.trace = self._trace([*self._path(loop[0]), *loop[1:]])
            found.trace.insert(len(found.trace) - len(loop) + 1, "from here on, for ever:")

    def _following(self, number: int) -> Sequence[int]:
        return self._edges[self._edges_from[number] : self._edges_from[number + 1]]

    def _loop(self, undone: list[bool]) -> list[int]:
        """Take undone states away that no undone one leads to, again and again; what is left is or follows a loop."""
        leading = array("q", bytes(8 * len(undone)))
        for number in filter(undone.__getitem__, range(len(undone))):
            for after in self._following(number):
                leading[after] += 1
        free = deque(number for number, is_undone in enumerate(undone) if is_undone and not leading[number])
        left = {number for number, is_undone in enumerate(undone) if is_undone} - set(free)
        while free:
            for after in self._following(free.popleft()):
                leading[after] -= 1
                if undone[after] and not leading[after]:
                    left.discard(after)
                    free.append(after)
        return next((loop for number in sorted(left) if (loop := self._way_back(number, left))), [])

    def _way_back(self, start: int, within: set[int]) -> list[int]:
        """Return the shortest way from a state to itself; nothing if there is none."""
        came_from: dict[int, int] = {}
        queue = deque([start])
        while queue:
            present = queue.popleft()
            for after in self._following(present):
                if after == start:
                    way = [start]
                    while present != start:
                        way.append(present)
                        present = came_from[present]
                    return [start, *reversed(way)]
                if after in within and after not in came_from:
                    came_from[after] = present
                    queue.append(after)
        return []

    def _path(self, number: int) -> list[int]:
        path = []
        while number >= 0:
            path.append(number)
            number = self._parent[number]
        return path[::-1]

    def _trace(self, path: list[int]) -> list[str]:
        """Walk a path once more, without renaming anything on the way, so that its labels speak of the same actors."""
        protocol = self._protocol
        state, labels = protocol.start(), []
        for number in path[1:]:
            wanted = self._states[number]
            step = next(step for step in protocol.steps(state) if protocol.normal(step.after) == wanted)
            labels.append(step.label)
            state = step.after
        return labels
