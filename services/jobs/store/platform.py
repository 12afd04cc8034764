"""Statements on `platform_switch`: whether jobs can be created (CR-5)."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from services.jobs.store.database import Transaction
from services.jobs.store.tables import platform_switch
from services.jobs.store.time import now

ID = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether jobs can be created, and who last said so."""

    available: bool = True
    reason: str = ""
    changed_by: str = ""
    changed_at: datetime | None = None


async def read(tx: Transaction) -> Availability:
    """Read the switch."""
    columns = [platform_switch.c[name] for name in ("available", "reason", "changed_by", "changed_at")]
    row = (await tx.execute(select(*columns))).mappings().one_or_none()
    return Availability() if row is None else Availability(**row)


async def write(tx: Transaction, *, available: bool, reason: str, by: str) -> None:
    """Set the switch."""
    values = {"available": available, "reason": reason, "changed_by": by, "changed_at": now()}
    if tx.sqlite:
        statement = sqlite_insert(platform_switch).values(id=ID, **values)
        await tx.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))
    else:
        await tx.execute(mysql_insert(platform_switch).values(id=ID, **values).on_duplicate_key_update(values))
