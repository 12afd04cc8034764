"""Statements on `requests`: answers already given, found again by (caller, user, method, request id) (ruling 33)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select

from aijobs.errors import RequestIdReused
from services.jobs.store.database import Transaction
from services.jobs.store.tables import requests
from services.jobs.store.time import now


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a request."""

    caller: str
    user_id: str
    method: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that was answered, and what the answer was made of."""

    key: RequestKey
    fingerprint: str
    job_id: str
    answer_json: str


async def find(tx: Transaction, keys: Iterable[RequestKey]) -> dict[RequestKey, Answered]:
    """Find the requests that were answered before."""
    found: dict[RequestKey, Answered] = {}
    for key in set(keys):
        statement = select(requests.c.fingerprint, requests.c.job_id, requests.c.answer_json).where(
            requests.c.caller == key.caller,
            requests.c.user_id == key.user_id,
            requests.c.method == key.method,
            requests.c.request_id == key.request_id,
        )
        for fingerprint, job_id, answer_json in await tx.execute(statement):
            found[key] = Answered(key=key, fingerprint=fingerprint, job_id=job_id, answer_json=answer_json)
    return found


async def recall(tx: Transaction, key: RequestKey, fingerprint: str) -> Answered | None:
    """Find what was answered to a request before; None: nothing yet.

    Raises:
        RequestIdReused: its id belongs to another request.

    """
    answered = (await find(tx, [key])).get(key)
    if answered is not None and answered.fingerprint != fingerprint:
        raise RequestIdReused
    return answered


async def remember(tx: Transaction, answers: Sequence[Answered]) -> None:
    """Store answers beside their effects, in the same transaction."""
    if not answers:
        return
    rows = [
        {
            **asdict(answer.key),
            "fingerprint": answer.fingerprint,
            "job_id": answer.job_id,
            "answer_json": answer.answer_json,
        }
        for answer in answers
    ]
    await tx.execute(insert(requests).values(created_at=now()), rows)
