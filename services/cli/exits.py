"""Exit statuses, and how a command fails in front of a person or a program."""

from enum import IntEnum

import grpc

from aijobs.errors import AijobsError


class Exit(IntEnum):
    """What the exit status of `aijobs` says. docs/cli.md and `aijobs --help` list the same."""

    OK = 0
    NOT_AS_WISHED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNAVAILABLE = 5
    BUG = 70
    CANNOT_WRITE = 74
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


HELP = (
    "Exit status: 0 fine; 1 the job ended failed or cancelled (jobs watch, --watch), or not all is as it must be "
    "(check); 2 bad usage or invalid input; 3 not found; 4 refused (wrong state, already exists, not permitted, not "
    "authenticated); 5 unreachable, unavailable, busy or too slow, or a limit is reached; 70 a bug; 74 the output "
    "cannot be written; 130 interrupted; 141 the reader of the output went away."
)

_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: Exit.BAD_INPUT,
    grpc.StatusCode.OUT_OF_RANGE: Exit.BAD_INPUT,
    grpc.StatusCode.NOT_FOUND: Exit.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION: Exit.REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: Exit.REFUSED,
    grpc.StatusCode.ABORTED: Exit.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: Exit.REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: Exit.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: Exit.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Exit.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Exit.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exit.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Exit.UNAVAILABLE,
}


class CommandError(Exception):
    """A command cannot go on, for a reason that lies on this side of the wire.

    Args:
        message: one sentence: what, and why.
        advice: one sentence: what to do next.
        status: what the process exits with.

    """

    def __init__(self, message: str, *, advice: str, status: Exit) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.status = status


def exit_of(error: AijobsError) -> Exit:
    """Return the exit status for an error of the service."""
    return _BY_STATUS.get(error.status, Exit.BUG)
