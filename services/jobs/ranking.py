"""The order of a queue: urgent jobs first, users in turn, nobody waits for ever (QU-3, ruling 23).

One stored moment decides, the job's rank. When a job becomes due,

    start = the later of now and its line's virtual time          line: user, queue, priority
    the line's virtual time becomes start + QUANTUM
    rank = start + priority * PRIORITY_STEP

and the event with the smallest rank is claimed first. A user's thousand jobs are spread over the next hundred seconds,
so another user's job, ranked now, comes in between. A job of priority 0 is as if it had been created 500 s before one
of priority 50. Ranks of later jobs keep rising, so no job is passed by for ever. The order holds in the database; the
broker's queues are kept shallow (see `outbox.py`) and are first in, first out.

A job keeps its rank whatever happens to it: one that is taken over or handed back stands where it stood before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from services.jobs.store import ranks
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.store.ranks import Line

#: How far apart the places of one line's jobs are.
QUANTUM = timedelta(milliseconds=100)
#: How much later one step of priority is.
PRIORITY_STEP = timedelta(seconds=10)


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Gives places to the jobs of one transaction, which holds the rows of their users.

    Attributes:
        read_at: the database's time; what is due by then is ranked.

    """

    read_at: datetime
    places: dict[Line, datetime]
    _moved: set[Line] = field(default_factory=set)

    def rank(self, line: Line) -> datetime:
        """Give the next place of a line."""
        start = max(self.read_at, self.places.get(line, self.read_at))
        self.places[line] = start + QUANTUM
        self._moved.add(line)
        return start + line.priority * PRIORITY_STEP

    async def write(self, tx: Transaction) -> None:
        """Store how far the lines have come."""
        await ranks.store(tx, {line: self.places[line] for line in self._moved})


async def open_ranking(tx: Transaction, lines: Iterable[Line]) -> Ranking:
    """Look up where lines are. The users' rows must be locked by the transaction."""
    read_at, places = await ranks.read(tx, lines)
    return Ranking(read_at=read_at, places=places)


def line_of(job: JobRow) -> Line:
    """Return the line in which a job stands."""
    return Line(job.user_id, job.queue, job.priority)
