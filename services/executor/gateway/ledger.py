"""The port to the usage ledger: a row for every model call, opened before it and settled after it (EX-6)."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from aijobs.definition import CredentialMode
from aijobs.job_type import ModelTier
from services.executor.gateway.provider import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOpened:
    """A model call that is about to start. `call_no` is unique within the attempt, from 1."""

    call_no: int
    provider: str
    model: str
    tier: ModelTier
    prompt_key: str
    prompt_version: str
    credential_mode: CredentialMode


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettled:
    """What became of a call. It carries the opened row, so that it stands by itself if that one got lost.

    `error_code` is a code of the taxonomy, empty for a success. `VALIDATION_*`: the call succeeded and its answer
    was of no use.
    """

    opened: CallOpened
    usage: Usage
    latency: timedelta
    error_code: str = ""


class UsageLedger(Protocol):
    """Keeps the rows of one attempt of one job. Both methods may be repeated with the same values."""

    async def opened(self, call: CallOpened) -> None:
        """Store that a call is about to start. If this fails, the call is not made."""
        ...

    async def settled(self, call: CallSettled) -> None:
        """Store how a call ended, whatever became of the lease. Retries short outages by itself."""
        ...
