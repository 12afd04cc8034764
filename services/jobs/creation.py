"""Creating jobs: job, snapshot, history and enqueue event in one transaction, or nothing (CR-1…CR-4).

Creates of one user are put in line by the user's row, which every create locks first. So a request id or an
idempotency key that is looked up under that lock cannot be inserted by somebody else in the meantime.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
from pydantic import BaseModel, JsonValue, ValidationError
from uuid_utils import uuid7

from aijobs import canonical
from aijobs.definition import JobDefinition
from aijobs.errors import (
    AijobsError,
    FieldViolation,
    IdempotencyKeyReused,
    InternalError,
    InvalidIdempotencyKey,
    InvalidInput,
    PayloadTooLarge,
    RequestIdReused,
)
from aijobs.identifiers import is_identifier, rule
from aijobs.logs import place_of
from aijobs.registry import Registry
from services.jobs import events
from services.jobs.batches import write_each
from services.jobs.store import changes, contents, outbox, requests, users
from services.jobs.store import jobs as job_store
from services.jobs.store.database import Database, Transaction
from services.jobs.store.jobs import JobRow
from services.jobs.wakeups import Wakeups

METHOD = "CreateJob"
LABEL_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
MOST_LABELS = 16
LONGEST_LABEL = 256
LARGEST_INPUT = 1024 * 1024
#: Inputs above this are checked in a thread: a second of validation must not hold up everybody's heartbeats.
LARGE_INPUT = 16 * 1024
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A create request as a caller made it, its input already JSON."""

    request_id: str
    user_id: str
    job_type: str
    target_type: str
    target_id: str
    input: JsonValue
    #: Size of the input as it was sent, in bytes.
    input_size: int
    idempotency_key: str | None
    strict_idempotency: bool
    labels: Mapping[str, str]
    priority: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The job that now exists."""

    job: JobRow
    deduplicated: bool
    request_differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A request that fits its definition."""

    request: NewJob
    definition: JobDefinition
    snapshot_json: str
    fingerprint: str
    caller: str

    @property
    def request_key(self) -> requests.RequestKey:
        return requests.RequestKey(self.caller, self.request.user_id, METHOD, self.request.request_id)

    @property
    def idempotency(self) -> tuple[str, str, str] | None:
        key = self.request.idempotency_key
        return (self.request.user_id, self.request.job_type, key) if key is not None else None


class JobCreation:
    """Creates jobs."""

    def __init__(self, database: Database, registry: Registry, wakeups: Wakeups) -> None:
        self._database = database
        self._registry = registry
        self._wakeups = wakeups

    async def check(self, request: NewJob) -> None:
        """Check a request without writing anything.

        Raises:
            InvalidInput: or one of its children; names every field that is wrong.

        """
        checked = await self._checked_aside(request, caller="")
        if isinstance(checked, AijobsError):
            raise checked

    async def create(self, caller: str, batch: Sequence[NewJob]) -> list[Created | AijobsError]:
        """Create jobs; each request gets its own job or its own error.

        Args:
            caller: who asks; request ids are its own.
            batch: at most 100 requests.

        Raises:
            Unavailable: the database cannot be reached.

        """
        checked = [await self._checked_aside(request, caller) for request in batch]
        good = [item for item in checked if isinstance(item, _Checked)]
        written = iter(await write_each(self._database, good, self._create))
        return [next(written) if isinstance(item, _Checked) else item for item in checked]

    async def _create(self, tx: Transaction, batch: Sequence[_Checked]) -> list[Created | AijobsError]:
        await users.lock(tx, (item.request.user_id for item in batch))
        answered = await requests.find(tx, (item.request_key for item in batch))
        known = await job_store.find_by_key(tx, (item.idempotency for item in batch if item.idempotency))
        by_key = {key: (row.job_id, row.request_fingerprint) for key, row in known.items()}
        plans: list[tuple[str, bool, bool] | AijobsError] = []
        new: list[tuple[str, _Checked]] = []
        memories: dict[requests.RequestKey, requests.Answered] = dict(answered)
        fresh: list[requests.Answered] = []
        for item in batch:
            memory = memories.get(item.request_key)
            if memory is not None:
                if memory.fingerprint != item.fingerprint:
                    plans.append(RequestIdReused())
                else:
                    answer = json.loads(memory.answer_json)
                    plans.append((memory.job_id, answer["deduplicated"], answer["requestDiffers"]))
                continue
            earlier = by_key.get(item.idempotency) if item.idempotency else None
            if earlier is not None:
                job_id, deduplicated, differs = earlier[0], True, earlier[1] != item.fingerprint
                if differs and item.request.strict_idempotency:
                    plans.append(
                        IdempotencyKeyReused(f"idempotency_key: job {job_id} was created with it by another request")
                    )
                    continue
            else:
                job_id, deduplicated, differs = str(uuid7()), False, False
                new.append((job_id, item))
                if item.idempotency:
                    by_key[item.idempotency] = (job_id, item.fingerprint)
            plans.append((job_id, deduplicated, differs))
            fresh.append(_remembered(item, job_id, deduplicated=deduplicated, differs=differs))
            memories[item.request_key] = fresh[-1]
        await self._insert(tx, new)
        await requests.remember(tx, fresh)
        rows = await job_store.get(tx, (plan[0] for plan in plans if not isinstance(plan, AijobsError)))
        return [
            plan
            if isinstance(plan, AijobsError)
            else Created(job=rows[plan[0]], deduplicated=plan[1], request_differs=plan[2])
            for plan in plans
        ]

    async def _insert(self, tx: Transaction, new: Sequence[tuple[str, _Checked]]) -> None:
        if not new:
            return
        rows = [_row(job_id, item) for job_id, item in new]
        await changes.insert_queued(tx, rows, actor=f"caller:{new[0][1].caller}")
        await contents.insert_snapshots(
            tx,
            [
                {
                    "job_id": job_id,
                    "schema_version": item.definition.input.version,
                    "content_json": item.snapshot_json,
                }
                for job_id, item in new
            ],
        )
        await outbox.append(
            tx,
            [
                events.enqueue(
                    row["job_id"],
                    job_type=row["job_type"],
                    queue=row["queue"],
                    priority=row["priority"],
                    dispatch_no=1,
                )
                for row in rows
            ],
        )
        tx.after_commit(self._wakeups.events.give)

    async def _checked_aside(self, request: NewJob, caller: str) -> _Checked | AijobsError:
        try:
            if request.input_size <= LARGE_INPUT:
                return self._checked(request, caller)
            return await asyncio.to_thread(self._checked, request, caller)
        except AijobsError as error:
            return error

    def _checked(self, request: NewJob, caller: str) -> _Checked:
        definition = self._registry[request.job_type]
        violations = _field_violations(request)
        if violations:
            raise InvalidInput.fields(violations)
        if request.idempotency_key is not None and not is_identifier(request.idempotency_key):
            raise InvalidIdempotencyKey.field("idempotency_key", rule())
        snapshot_json = _snapshot(definition.input.model, request.input)
        return _Checked(
            request=request,
            definition=definition,
            snapshot_json=snapshot_json,
            fingerprint=_fingerprint(request),
            caller=caller,
        )


def _field_violations(request: NewJob) -> list[FieldViolation]:
    problems: list[FieldViolation] = []
    for name, value, optional in (
        ("request_id", request.request_id, False),
        ("user_id", request.user_id, False),
        ("target.type", request.target_type, True),
        ("target.id", request.target_id, True),
    ):
        if not (optional and not value) and not is_identifier(value):
            problems.append(FieldViolation(name, rule()))
    if bool(request.target_type) != bool(request.target_id):
        problems.append(FieldViolation("target", "needs both type and id"))
    if len(request.labels) > MOST_LABELS:
        problems.append(FieldViolation("labels", f"{len(request.labels)} labels; at most {MOST_LABELS}"))
    for key, value in request.labels.items():
        if not LABEL_KEY.fullmatch(key):
            problems.append(FieldViolation("labels", f"key {key[:80]!r} must match {LABEL_KEY.pattern}"))
        elif len(value) > LONGEST_LABEL or "\x00" in value:
            problems.append(FieldViolation(f"labels.{key}", f"at most {LONGEST_LABEL} characters, none of them NUL"))
    if request.priority is not None and not 0 <= request.priority <= 100:  # noqa: PLR2004 - the bounds of RG-1
        problems.append(FieldViolation("overrides.priority", "must be from 0 to 100"))
    return problems


def _snapshot(model: type[BaseModel], value: JsonValue) -> str:
    """Validate the caller's input and freeze it, defaults filled in, as canonical JSON."""
    try:
        canonical.check(value)
        validated = model.model_validate(value)
        text = canonical.dump(validated.model_dump(mode="json", by_alias=True))
    except canonical.NotStrictJson as error:
        raise InvalidInput.field("input", str(error)) from error
    except ValidationError as error:
        raise InvalidInput.fields(
            [
                FieldViolation(
                    ".".join(["input", *map(str, problem["loc"])]), problem["msg"].removeprefix("Value error, ")
                )
                for problem in error.errors(include_url=False, include_context=False, include_input=False)[:20]
            ]
        ) from error
    except Exception as error:  # noqa: BLE001 - see below
        # A job type's own validator broke. Its message may repeat what the caller sent, so only the place is logged.
        log.error("input validator failed", model=model.__name__, error=place_of(error))
        raise InternalError("the job type cannot check this input") from None
    size = len(text.encode())
    if size > LARGEST_INPUT:
        raise PayloadTooLarge.field("input", f"{size} bytes with its defaults; at most {LARGEST_INPUT}")
    return text


def _fingerprint(request: NewJob) -> str:
    """Hash everything that was asked for but the request id: what two requests must share to be the same (CR-2).

    The input goes in as it was sent: with the defaults of a definition filled in, a repeat after an upgrade that
    changed one would look like another request.
    """
    asked: dict[str, Any] = {
        "jobType": request.job_type,
        "userId": request.user_id,
        "target": [request.target_type, request.target_id],
        "input": canonical.digest(canonical.dump(request.input)),
        "idempotencyKey": request.idempotency_key,
        "labels": dict(request.labels),
        "priority": request.priority,
    }
    return canonical.digest(canonical.dump(asked))


def _row(job_id: str, item: _Checked) -> dict[str, Any]:
    request, definition = item.request, item.definition
    return {
        "job_id": job_id,
        "job_type": request.job_type,
        "user_id": request.user_id,
        "target_type": request.target_type,
        "target_id": request.target_id,
        "queue": str(definition.routing.queue),
        "priority": definition.routing.default_priority if request.priority is None else request.priority,
        "labels_json": canonical.dump(dict(request.labels)),
        "idempotency_key": request.idempotency_key,
        "request_fingerprint": item.fingerprint,
        "definition_version": definition.metadata.version,
        "cancellable": definition.execution.cancellable,
        "max_retries": definition.max_retries,
        "backoff_ms": definition.backoff // timedelta(milliseconds=1),
        "abort_strategy": definition.execution.abort_strategy,
    }


def _remembered(item: _Checked, job_id: str, *, deduplicated: bool, differs: bool) -> requests.Answered:
    return requests.Answered(
        key=item.request_key,
        fingerprint=item.fingerprint,
        job_id=job_id,
        answer_json=json.dumps({"deduplicated": deduplicated, "requestDiffers": differs}),
    )
