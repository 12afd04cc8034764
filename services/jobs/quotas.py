"""Limits per user: jobs alive at a time, and jobs created per UTC day and month (CR-5).

All of it is looked up and written under the lock of the user's row, which every create takes first, so it is exact.
Live jobs are counted, not kept count of: nothing has to be given back when a job ends, whatever way it ends. Created
jobs are counted up, and only where a quota is set, because old jobs are deleted while the month goes on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field

from aijobs.errors import AijobsError, QuotaExceeded, QuotaViolation, TooManyJobs
from services.jobs.store import quotas as quota_store
from services.jobs.store.database import Transaction
from services.jobs.store.quotas import Counter

#: A hint for callers who met the limit of live jobs.
RETRY_AFTER = timedelta(seconds=5)


class Limits(BaseModel):
    """What a user may have; unset ones do not limit.

    Attributes:
        live: jobs that have not ended.
        daily: jobs created in a UTC day.
        monthly: jobs created in a UTC month.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    live: int | None = Field(default=None, ge=0)
    daily: int | None = Field(default=None, ge=0)
    monthly: int | None = Field(default=None, ge=0)

    @property
    def counts_created(self) -> bool:
        """True if there is a quota of created jobs."""
        return self.daily is not None or self.monthly is not None


class Quotas:
    """The limits that hold.

    Args:
        every: for all jobs of a user together.
        by_type: for those of one type, besides.

    """

    def __init__(self, every: Limits, by_type: Mapping[str, Limits] = MappingProxyType({})) -> None:
        self._limits = {**by_type, "": every}

    async def open(self, tx: Transaction, user_ids: Iterable[str]) -> "QuotaBook":
        """Look up what users have. Their rows must be locked by the transaction."""
        users = sorted(set(user_ids))
        live: dict[tuple[str, str], int] = {}
        if any(limits.live is not None for limits in self._limits.values()):
            live = await quota_store.live_jobs(tx, users, by_type=len(self._limits) > 1)
        created: dict[Counter, int] = {}
        periods: Mapping[str, str] = {}
        if any(limits.counts_created for limits in self._limits.values()):
            periods = _periods(await quota_store.today(tx))
            created = await quota_store.created_jobs(tx, users, list(periods.values()))
        return QuotaBook(limits=self._limits, live=live, created=created, periods=periods)


@dataclass(slots=True, kw_only=True)
class QuotaBook:
    """What the users of one transaction have, counted on as jobs are admitted."""

    limits: Mapping[str, Limits]
    live: dict[tuple[str, str], int]
    created: dict[Counter, int]
    periods: Mapping[str, str]
    _touched: set[Counter] = field(default_factory=set)

    def admit(self, user_id: str, job_type: str) -> AijobsError | None:
        """Count one more job of a user, or say which limit it would break."""
        scopes = [scope for scope in ("", job_type) if scope in self.limits]
        for scope in scopes:
            problem = self._problem(user_id, scope)
            if problem is not None:
                return problem
        for scope in scopes:
            self.live[user_id, scope] = self.live.get((user_id, scope), 0) + 1
            if self.limits[scope].counts_created:
                for period in self.periods.values():
                    counter = Counter(user_id, scope, period)
                    self.created[counter] = self.created.get(counter, 0) + 1
                    self._touched.add(counter)
        return None

    async def write(self, tx: Transaction) -> None:
        """Store what was counted up."""
        await quota_store.store(tx, {counter: self.created[counter] for counter in self._touched})

    def _problem(self, user_id: str, scope: str) -> AijobsError | None:
        limits = self.limits[scope]
        what = f"jobs of type {scope}" if scope else "jobs"
        if limits.live is not None and self.live.get((user_id, scope), 0) >= limits.live:
            text = f"user {user_id} has {limits.live} {what} that have not ended, as many as one may have"
            return TooManyJobs(text, quota_violations=[_violation(user_id, text)], retry_after=RETRY_AFTER)
        for limit, name in ((limits.daily, "day"), (limits.monthly, "month")):
            if limit is not None and self.created.get(Counter(user_id, scope, self.periods[name]), 0) >= limit:
                text = f"user {user_id} has used the quota of {limit} {what} of this {name} (UTC)"
                return QuotaExceeded(text, quota_violations=[_violation(user_id, text)])
        return None


def _violation(user_id: str, text: str) -> QuotaViolation:
    return QuotaViolation(f"user:{user_id}", text)


def _periods(today: datetime) -> Mapping[str, str]:
    return {"day": f"{today:%Y-%m-%d}", "month": f"{today:%Y-%m}"}
