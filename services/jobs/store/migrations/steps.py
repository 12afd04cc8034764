"""Steps of a migration that may be taken again.

MySQL commits every CREATE by itself: a migration that was killed leaves the first tables behind, and the next run must
go on from there instead of failing on them.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import SchemaItem


def create_table(name: str, *items: SchemaItem, **options: Any) -> None:
    """Create a table unless it is there."""
    if not sa.inspect(op.get_bind()).has_table(name):
        op.create_table(name, *items, **options)


def create_index(name: str, table: str, columns: Sequence[str], *, unique: bool) -> None:
    """Create an index unless it is there."""
    present = {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}
    if name not in present:
        op.create_index(name, table, list(columns), unique=unique)
