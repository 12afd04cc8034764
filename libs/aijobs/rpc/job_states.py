"""Job states between the contract's numbers and our words."""

from aijobs.states import TERMINAL_STATES, JobState
from aijobs.v1 import job_pb2

_PREFIX = "JOB_STATE_"


def to_proto(state: JobState) -> "job_pb2.JobState.ValueType":
    """Return the contract's value of a state."""
    return job_pb2.JobState.Value(_PREFIX + state.name)


def from_proto(value: "job_pb2.JobState.ValueType") -> JobState:
    """Return the state of a value of the contract.

    Raises:
        ValueError: unspecified, or newer than this version.

    """
    name = job_pb2.JobState.Name(value)
    return JobState(name.removeprefix(_PREFIX).lower())


#: The values that a watch ends with.
TERMINAL_VALUES = frozenset(to_proto(state) for state in TERMINAL_STATES)
