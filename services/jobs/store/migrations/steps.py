"""Steps of a migration that may be taken again.

MySQL commits every CREATE by itself: a migration that was killed leaves the first tables behind, and the next run must
go on from there instead of failing on them.
"""

from collections.abc import Mapping, Sequence
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


def drop_index(name: str, table: str) -> None:
    """Drop an index if it is there."""
    if name in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.drop_index(name, table)


def alter_table(
    name: str,
    *,
    columns: Sequence[sa.Column[Any]] = (),
    nullable: Mapping[str, sa.types.TypeEngine[Any]] | None = None,
    checks: Mapping[str, str | None] | None = None,
    dropped: Sequence[str] = (),
) -> None:
    """Change a table as far as it is not changed yet.

    Args:
        name: the table.
        columns: to add.
        nullable: columns that may be empty from now on, with their types.
        checks: constraints and their conditions from now on, whatever they had before; None: dropped.
        dropped: columns to drop.

    """
    inspector = sa.inspect(op.get_bind())
    present = {column["name"] for column in inspector.get_columns(name)}
    constraints = {check["name"] for check in inspector.get_check_constraints(name)}
    # On SQLite this copies the whole table: it cannot change a constraint in place.
    with op.batch_alter_table(name) as batch:
        for column in columns:
            if column.name not in present:
                batch.add_column(column)
        for column_name, kind in (nullable or {}).items():
            batch.alter_column(column_name, existing_type=kind, nullable=True)
        for constraint, condition in (checks or {}).items():
            if constraint in constraints:
                batch.drop_constraint(op.f(constraint), type_="check")
            if condition is not None:
                batch.create_check_constraint(op.f(constraint), condition)
        for column_name in dropped:
            if column_name in present:
                batch.drop_column(column_name)
