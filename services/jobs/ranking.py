"""The order of a queue: urgent jobs first, users in turn, nobody waits for ever (QU-3, ruling 23).

One stored moment decides, the job's rank. When a job becomes due,

    start = the later of now and its line's virtual time          line: user, queue, priority
    the line's virtual time becomes start + quantum
    rank = start + priority * PRIORITY_STEP

and the event with the smallest rank is claimed first. A user's thousand jobs are spread over the next hundred seconds,
so another user's job, ranked now, comes in between: behind as many of the first user's jobs as quanta have passed since
the first of them, less those that have run. So users are fair to each other as long as a queue runs a job a quantum; an
engine whose jobs are slow gets a longer quantum.

A job of priority 0 is as if it had been created 500 s before one of priority 50. Ranks of later jobs keep rising, so no
job is passed by for ever. The order holds in the database; the broker's queues are kept shallow (see `outbox.py`) and
are first in, first out.

A job keeps its rank whatever happens to it: one that is taken over or handed back stands where it stood before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from services.jobs.store import ranks
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.ranks import Line

#: How much later one step of priority is.
PRIORITY_STEP = timedelta(seconds=10)


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Gives places to the jobs of one transaction, which holds the rows of their users.

    Attributes:
        read_at: the database's time; what is due by then is ranked.
        places: where the next job of each line is placed; lines that have none are missing.
        quantum: how far apart the places of a line are.

    """

    read_at: datetime
    places: dict[Line, datetime]
    quantum: timedelta
    _moved: set[Line] = field(default_factory=set)

    def rank(self, line: Line) -> datetime:
        """Give the next place of a line."""
        start = max(self.read_at, self.places.get(line, self.read_at))
        self.places[line] = start + self.quantum
        self._moved.add(line)
        return start + line.priority * PRIORITY_STEP

    async def write(self, tx: Transaction) -> None:
        """Store how far the lines have come."""
        await ranks.store(tx, {line: self.places[line] for line in self._moved})


class QueueOrder:
    """The order of the queues.

    Args:
        quantum: how far apart the places of one line's jobs are.

    """

    def __init__(self, quantum: timedelta) -> None:
        self._quantum = quantum

    async def open(self, tx: Transaction, lines: Iterable[Line]) -> Ranking:
        """Look up where lines are. The users' rows must be locked by the transaction."""
        read_at, places = await ranks.read(tx, lines)
        return Ranking(read_at=read_at, places=places, quantum=self._quantum)


def line_of(job: JobRow) -> Line:
    """Return the line in which a job stands."""
    return Line(job.user_id, job.queue, job.priority)
