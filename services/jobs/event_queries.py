"""Reading outbox events for operators: a page, how many there are, and those that nobody can send (OB-3, OB-5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from aijobs.definition import Queue
from aijobs.errors import InvalidInput
from services.jobs.queries import DEFAULT_PAGE, LARGEST_PAGE
from services.jobs.store import dispatchers
from services.jobs.store import outbox as outbox_store
from services.jobs.store import outbox_admin as store
from services.jobs.store.database import Database, Transaction
from services.jobs.store.outbox import EventStatus
from services.jobs.store.outbox_admin import EventDetail, EventFilter

#: Nothing is counted further.
MOST_COUNTED = 10_000
LONGEST_TOKEN = 18
#: Dispatchers say with every claim what they can send, so within this time again.
SENDABLE_WITHIN = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """One page of events, newest first."""

    events: Sequence[EventDetail]
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCounts:
    """How many events there are, each number at most 10,000.

    Attributes:
        by_status: every status.
        parked: pending events of types that no dispatcher could send lately, by type.

    """

    by_status: Mapping[EventStatus, int]
    parked: Mapping[str, int]


class EventQueries:
    """Reads events.

    Args:
        database: where they are.

    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, wanted: EventFilter, *, statuses: Sequence[EventStatus] = (), size: int = 0, token: str = ""
    ) -> EventPage:
        """Read a page of events that fit the filter.

        Args:
            wanted: the filter.
            statuses: only events in one of these; none: in any.
            size: events at most; 0 means 50.
            token: `next_page_token` of the page before; empty for the first.

        Raises:
            InvalidInput: the size is out of range or the token is none of ours.
            Unavailable: the database cannot be reached.

        """
        if not 0 <= size <= LARGEST_PAGE:
            raise InvalidInput.field("page_size", f"must be from 0 to {LARGEST_PAGE}")
        if token and not (token.isascii() and token.isdigit() and len(token) <= LONGEST_TOKEN):
            raise InvalidInput.field("page_token", "not a token of an earlier page")
        limit = size or DEFAULT_PAGE
        before = int(token) if token else None
        look = partial(store.page, wanted=wanted, statuses=statuses, before=before, limit=limit + 1)
        rows = await self._database.read(look)
        shown = rows[:limit]
        return EventPage(events=shown, next_page_token=str(shown[-1].id) if len(rows) > limit else "")

    async def counts(self) -> EventCounts:
        """Count the events by status, and the parked ones by type.

        Raises:
            Unavailable: the database cannot be reached.

        """
        by_status = await self._database.read(partial(store.counts, statuses=EventStatus, most=MOST_COUNTED))
        parked = {event_type: min(count, MOST_COUNTED) for event_type, count in (await self.parked()).items()}
        return EventCounts(by_status=by_status, parked=parked)

    async def parked(self) -> Mapping[str, int]:
        """Count the pending events of types that no dispatcher could send lately, by type; none while none is there.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> Mapping[str, int]:
            sendable = await dispatchers.sendable(tx, SENDABLE_WITHIN)
            return await outbox_store.parked(tx, sorted(sendable), ("", *Queue)) if sendable else {}

        return await self._database.read(work)
