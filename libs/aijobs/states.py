"""The states of a job and the five legal changes between them (LC-1, LC-2)."""

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life. QUEUED is the only initial state."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """True for the three states that never change again."""
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

#: Everything that is not in here is illegal. A taken-over run stays `running` (ruling 1), so it is no change.
LEGAL_CHANGES = frozenset(
    {
        (JobState.QUEUED, JobState.RUNNING),
        (JobState.QUEUED, JobState.CANCELLED),
        (JobState.RUNNING, JobState.SUCCEEDED),
        (JobState.RUNNING, JobState.FAILED),
        (JobState.RUNNING, JobState.CANCELLED),
    }
)
