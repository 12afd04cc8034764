"""Whether a create request can be a job at all, before anything is read or written (CR-3, CR-4).

A request that fits becomes an `Admitted`: with its definition, its input frozen as canonical JSON, and the fingerprint
by which a repeat is told from another request.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from pydantic import BaseModel, JsonValue, ValidationError

from aijobs import canonical
from aijobs.definition import CredentialMode, JobDefinition
from aijobs.errors import (
    AijobsError,
    FieldViolation,
    InternalError,
    InvalidIdempotencyKey,
    InvalidInput,
    PayloadTooLarge,
)
from aijobs.identifiers import is_identifier, rule
from aijobs.logs import place_of
from aijobs.registry import Registry

LABEL_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
MOST_LABELS = 16
LONGEST_LABEL = 256
LARGEST_INPUT = 1024 * 1024
#: Keys of follow-up jobs begin so: `follow-up:<job id>:<n>` (PJ-3).
FOLLOW_UP_KEY = "follow-up:"
LATEST_START = timedelta(days=366)
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
    credential_mode: str = ""
    credential_id: str = ""
    prompt_version: str = ""
    output_schema_version: str = ""
    #: When the job may start; None: at once.
    run_at: datetime | None = None
    #: The caller's trace, a valid traceparent. No part of what is asked for, so none of the fingerprint.
    trace_context: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that fits its definition."""

    request: NewJob
    definition: JobDefinition
    snapshot_json: str
    fingerprint: str


async def admit(registry: Registry, request: NewJob) -> Admitted | AijobsError:
    """Check a request; a large one beside the event loop.

    Returns an error of the class InvalidInput, or of one of its children, that names every field that is wrong.
    """
    try:
        if request.input_size <= LARGE_INPUT:
            return _admit(registry, request)
        return await asyncio.to_thread(_admit, registry, request)
    except AijobsError as error:
        return error


def _admit(registry: Registry, request: NewJob) -> Admitted:
    definition = registry[request.job_type]
    violations = [*_field_violations(request), *_override_violations(definition, request)]
    if violations:
        raise InvalidInput.fields(violations)
    if request.idempotency_key is not None and not is_identifier(request.idempotency_key):
        raise InvalidIdempotencyKey.field("idempotency_key", rule())
    if (request.idempotency_key or "").startswith(FOLLOW_UP_KEY):
        raise InvalidIdempotencyKey.field("idempotency_key", f"keys that begin with {FOLLOW_UP_KEY} are the engine's")
    return Admitted(
        request=request,
        definition=definition,
        snapshot_json=_snapshot(definition.input.model, request.input),
        fingerprint=_fingerprint(request),
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
    if request.run_at is not None and request.run_at > datetime.now(UTC) + LATEST_START:
        problems.append(FieldViolation("run_at", f"at most {LATEST_START.days} days ahead"))
    return problems


def _override_violations(definition: JobDefinition, request: NewJob) -> list[FieldViolation]:
    """Check the overrides against the definition (CR-4)."""
    problems: list[FieldViolation] = []
    mode = request.credential_mode or definition.credentials.default
    if mode not in definition.credentials.allowed:
        allowed = ", ".join(definition.credentials.allowed)
        problems.append(FieldViolation("overrides.credential_mode", f"this job type allows: {allowed}"))
    elif mode != CredentialMode.PLATFORM_KEY:
        # Never run it with another key than was asked for.
        problems.append(FieldViolation("overrides.credential_mode", "keys of users cannot be stored yet"))
    elif request.credential_id:
        problems.append(FieldViolation("overrides.credential_id", f"the mode {mode} takes none"))
    if request.prompt_version:
        problems.append(FieldViolation("overrides.prompt_version", "this job type has no versioned prompts"))
    if request.output_schema_version not in ("", definition.output.version):
        problems.append(
            FieldViolation("overrides.output_schema_version", f"this job type has only {definition.output.version}")
        )
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
                FieldViolation(".".join(["input", *map(str, problem["loc"])]), _words(problem["type"], problem["msg"]))
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


def _words(kind: str, message: str) -> str:
    """Say what is wrong in words of JSON, where pydantic's are of Python."""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be an object"
    if kind == "extra_forbidden":
        return "is no field of this input"
    return message.removeprefix("Value error, ")


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
    # Left out where they are not given, so that requests of before they existed keep their fingerprint.
    later: dict[str, Any] = {
        "credentialMode": request.credential_mode,
        "credentialId": request.credential_id,
        "promptVersion": request.prompt_version,
        "outputSchemaVersion": request.output_schema_version,
        "runAt": None if request.run_at is None else request.run_at.isoformat(),
    }
    asked |= {name: value for name, value in later.items() if value}
    return canonical.digest(canonical.dump(asked))
