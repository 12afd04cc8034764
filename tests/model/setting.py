"""What one exploration looks at: how many there are of each, and what may go wrong how often."""

from dataclasses import dataclass
from typing import Literal

from tests.model.flaws import Flaw
from tests.model.world import Report, World

#: late: a call gets no answer, and may be carried out later. late lock: the same of locks alone. late hello: of hellos.
#: crash: an executor dies. break: the session of one breaks that lives. slow: a lease or claim ends although its holder
#: lives. replica: the one that suspects an executor dies. dispatcher: one dies. The others are the broker's: it cannot
#: be reached, does not confirm, rejects, loses, doubles, or takes a message back from an executor that goes on.
Fault = Literal[
    "late", "crash", "break", "slow", "replica", "dispatcher", "outage", "unconfirmed", "rejected", "lost", "doubled",
    "cut", "late lock", "late hello",
]  # fmt: skip
Wish = Literal["pause", "handed back", "handed back for later", "unknown type"]

#: Messages of the job in the broker and with executors.
IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration of the model.

    Attributes:
        faults: how many of `kinds` may happen in one run.
        wishes: how many of `wanted` may happen in one run.
        failures: executions may fail.
        reaper: leases that nobody renews are ended; without it, only those whose holder lives.
        sweep: jobs whose message is lost are dispatched again.
        knows_leases: it counts as wrong that an executor holds a lease that it does not know of.

    """

    executors: int = 2
    dispatchers: int = 1
    cancellers: int = 0
    faults: int = 0
    kinds: frozenset[Fault] = frozenset()
    wishes: int = 0
    wanted: frozenset[Wish] = frozenset()
    failures: bool = False
    reaper: bool = True
    sweep: bool = True
    knows_leases: bool = False
    flaws: frozenset[Flaw] = frozenset()

    def fault(self, world: World, kind: Fault) -> World | None:
        """Let a fault happen if it may: return the world with one less to come."""
        if world.faults and kind in self.kinds and not world.ended:
            return world._replace(faults=world.faults - 1)
        return None

    def wish(self, world: World, kind: Wish | Report) -> World | None:
        """Let a wish come up if it may: return the world with one less to come."""
        if world.wishes and kind in self.wanted and not world.ended:
            return world._replace(wishes=world.wishes - 1)
        return None


def in_flight(world: World) -> int:
    """Count the messages of the job."""
    return world.messages + sum(executor.has_message for executor in world.executors)
