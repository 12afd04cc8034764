"""Statements on `model_invocations`, the usage ledger (EX-6).

A row is inserted when a call opens and completed when it is settled; either may arrive twice or alone, and a settled
row is never changed again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from sqlalchemy import func, insert, select, tuple_, update

from services.jobs.store.database import Transaction
from services.jobs.store.tables import model_invocations
from services.jobs.store.time import MICROSECOND, now

calls = model_invocations.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of a call."""

    input_tokens: int
    output_tokens: int
    token_source: str
    latency: timedelta
    error_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call, as the executor reports it. `settled` is None when it is about to start."""

    job_id: str
    attempt: int
    call_no: int
    provider: str
    model: str
    tier: str
    prompt_key: str
    prompt_version: str
    credential_mode: str
    settled: Settled | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model call with what its job says about it. `late`: the run it was made for had ended."""

    call: Call
    user_id: str
    job_type: str
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The settled calls of one job, summed up."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


async def record(tx: Transaction, entries: Sequence[Entry]) -> None:
    """Store calls, opened or settled, each as often as it is sent. The caller holds the jobs' rows."""
    if not entries:
        return
    keys = {(entry.call.job_id, entry.call.attempt, entry.call.call_no) for entry in entries}
    key = tuple_(calls.job_id, calls.attempt, calls.call_no)
    stored = await tx.execute(select(calls.job_id, calls.attempt, calls.call_no).where(key.in_(sorted(keys))))
    present = {(job_id, attempt, call_no) for job_id, attempt, call_no in stored}
    for entry in entries:
        call = entry.call
        identity = (call.job_id, call.attempt, call.call_no)
        if identity not in present:
            await tx.execute(
                insert(model_invocations).values(opened_at=now(), **_opened(entry), **_settled(call.settled))
            )
            present.add(identity)
        elif call.settled is not None:
            await tx.execute(
                update(model_invocations)
                .where(
                    calls.job_id == call.job_id,
                    calls.attempt == call.attempt,
                    calls.call_no == call.call_no,
                    calls.settled_at.is_(None),
                )
                .values(late=entry.late, **_settled(call.settled))
            )


async def totals(tx: Transaction, job_ids: Iterable[str]) -> dict[str, Totals]:
    """Sum the settled calls of jobs."""
    statement = (
        select(calls.job_id, func.count(), func.sum(calls.input_tokens), func.sum(calls.output_tokens))
        .where(calls.job_id.in_(list(job_ids)), calls.settled_at.is_not(None))
        .group_by(calls.job_id)
    )
    return {
        job_id: Totals(calls=count, input_tokens=int(sent), output_tokens=int(received))
        for job_id, count, sent, received in await tx.execute(statement)
    }


def _opened(entry: Entry) -> dict[str, Any]:
    said = {field.name: getattr(entry.call, field.name) for field in fields(Call) if field.name != "settled"}
    return said | {"user_id": entry.user_id, "job_type": entry.job_type, "late": entry.late}


def _settled(settled: Settled | None) -> dict[str, Any]:
    if settled is None:
        return {
            "settled_at": None,
            "input_tokens": 0,
            "output_tokens": 0,
            "token_source": "unknown",
            "latency_us": 0,
            "error_code": "",
        }
    return {
        "settled_at": now(),
        "input_tokens": settled.input_tokens,
        "output_tokens": settled.output_tokens,
        "token_source": settled.token_source,
        "latency_us": settled.latency // MICROSECOND,
        "error_code": settled.error_code,
    }
