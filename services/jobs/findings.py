"""What a check of the engine can find, in words for operators."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

#: Findings that are listed, at most; they are counted completely.
MOST_LISTED = 1000


class FindingKind(StrEnum):
    """What is wrong."""

    EVENT_MISSING = "event_missing"
    EVENT_DEAD = "event_dead"
    MESSAGE_LOST = "message_lost"
    LEASE_OVERDUE = "lease_overdue"
    NO_EXECUTOR = "no_executor"
    NO_DISPATCHER = "no_dispatcher"
    EVENTS_PARKED = "events_parked"
    END_EVENT_MISSING = "end_event_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be.

    Attributes:
        job_id: empty if it is about no single job.
        queue: empty if it is about no queue.
        problem: one sentence: what is wrong.
        advice: one sentence: what to do, or what was done.
        repaired: it is as it must be now.

    """

    kind: FindingKind
    job_id: str = ""
    queue: str = ""
    problem: str
    advice: str
    repaired: bool = False


@dataclass(slots=True)
class Report:
    """Collects findings: counts all of them, and keeps a thousand, of which those that are left come first."""

    found: Counter[FindingKind] = field(default_factory=Counter)
    repaired: Counter[FindingKind] = field(default_factory=Counter)
    _left: list[Finding] = field(default_factory=list)
    _done: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it while there is room."""
        self.found[finding.kind] += 1
        self.repaired[finding.kind] += finding.repaired
        kept = self._done if finding.repaired else self._left
        if len(kept) < MOST_LISTED:
            kept.append(finding)

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings that are listed."""
        return [*self._left, *self._done][:MOST_LISTED]

    @property
    def left(self) -> int:
        """How many findings were not repaired."""
        return self.found.total() - self.repaired.total()
