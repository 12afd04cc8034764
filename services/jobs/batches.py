"""Many items, one transaction, an answer for each.

A use case handles a whole batch in one transaction and returns a result or an error per item; refusals that it knows
beforehand are such errors and disturb nobody. If the transaction itself fails because of some item, it is rolled back
and every item gets a transaction of its own, so that a bad one harms only itself.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog
from sqlalchemy.exc import DBAPIError

from aijobs.errors import AijobsError, InternalError
from services.jobs.store.changes import StaleChange
from services.jobs.store.database import Database, Transaction, describe

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
log = structlog.get_logger()

#: What one item can do to a transaction: break a constraint, not fit a column, change under it. `Database` lets no
#: other error of the driver through.
FAULTS = (DBAPIError, StaleChange)
#: Tries of a single item whose row changed between read and write.
TRIES = 3


async def write_each(
    database: Database,
    items: Sequence[ItemT],
    work: Callable[[Transaction, Sequence[ItemT]], Awaitable[Sequence[ResultT | AijobsError]]],
) -> list[ResultT | AijobsError]:
    """Run `work` over the items and return one result or error per item, in order.

    Raises:
        Unavailable: the database cannot be reached; no item's outcome is known.

    """
    if not items:
        return []
    try:
        return list(await database.write(lambda tx: work(tx, items)))
    except FAULTS as error:
        log.warning("batch replayed one by one", items=len(items), error=describe(error))
    return [await _write_one(database, item, work) for item in items]


async def _write_one(
    database: Database,
    item: ItemT,
    work: Callable[[Transaction, Sequence[ItemT]], Awaitable[Sequence[ResultT | AijobsError]]],
) -> ResultT | AijobsError:
    for attempt in range(1, TRIES + 1):
        try:
            (result,) = await database.write(lambda tx: work(tx, [item]))
        except FAULTS as error:
            log.error("item failed", attempt=attempt, error=describe(error))
        else:
            return result
    return InternalError("the change does not go together with what is stored")
