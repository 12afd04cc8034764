"""Business rows: what a result writes into tables of its own, in the transaction of its success (PJ-1, ruling 10).

A projector names a writer and gives it a content. Writers are parts of the jobs service, one for each kind of row: they
alone know the tables. Each sees to it that what it writes belongs to the user of the job.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import JsonValue

from aijobs import canonical
from aijobs.errors import FieldViolation, InvalidInput
from services.jobs.results import BusinessRow, parsed
from services.jobs.store.database import Transaction
from services.jobs.store.jobs import JobRow

MOST_ROWS = 200


class RowWriter(Protocol):
    """Writes rows of one kind."""

    async def check(self, tx: Transaction, job: JobRow, contents: Sequence[JsonValue]) -> None:
        """Refuse contents that do not fit, or that name what is not the job's user's; writes nothing.

        Raises:
            InvalidInput: names what is wrong.

        """
        ...

    async def write(self, tx: Transaction, job: JobRow, contents: Sequence[JsonValue]) -> None:
        """Write contents that were checked in this transaction. A conflict fails all of it (ruling 22)."""
        ...


#: The contents of one result, by writer.
Contents = Mapping[str, Sequence[JsonValue]]


class BusinessRows:
    """The writers there are, by name."""

    def __init__(self, writers: Mapping[str, RowWriter]) -> None:
        self._writers = writers

    async def read(self, rows: Sequence[BusinessRow]) -> Contents:
        """Read what a result wants written, before any transaction.

        Raises:
            InvalidInput: names every row that is wrong, below `succeeded.projection.rows`.

        """
        if len(rows) > MOST_ROWS:
            raise InvalidInput.field("succeeded.projection.rows", f"{len(rows)}; at most {MOST_ROWS}")
        contents: dict[str, list[JsonValue]] = {}
        problems: list[FieldViolation] = []
        for index, row in enumerate(rows):
            place = f"succeeded.projection.rows[{index}]"
            if row.writer not in self._writers:
                known = ", ".join(sorted(self._writers)) or "none"
                problems.append(FieldViolation(f"{place}.writer", f"no writer {row.writer[:80]!r}; known: {known}"))
                continue
            try:
                contents.setdefault(row.writer, []).append(await parsed(row.content_json))
            except canonical.NotStrictJson as error:
                problems.append(FieldViolation(f"{place}.content_json", str(error)))
        if problems:
            raise InvalidInput.fields(problems)
        return contents

    async def check(self, tx: Transaction, job: JobRow, contents: Contents) -> None:
        """Let every writer check its contents.

        Raises:
            InvalidInput: one of them refuses.

        """
        for writer, values in contents.items():
            await self._writers[writer].check(tx, job, values)

    async def write(self, tx: Transaction, job: JobRow, contents: Contents) -> None:
        """Let every writer write its contents."""
        for writer, values in contents.items():
            await self._writers[writer].write(tx, job, values)
