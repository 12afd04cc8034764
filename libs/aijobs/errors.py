"""Every error that a caller can meet, as one tree; each class carries its reason, gRPC status and advice (AP-2).

    AijobsError
    ├── InvalidInput            INVALID_INPUT             names the field
    │   ├── UnknownJobType      UNKNOWN_JOB_TYPE
    │   ├── PayloadTooLarge     PAYLOAD_TOO_LARGE
    │   └── InvalidIdempotencyKey
    ├── JobNotFound             JOB_NOT_FOUND             also for another user's job
    ├── JobNotCancellable       JOB_NOT_CANCELLABLE
    ├── JobAlreadyCancelled     JOB_ALREADY_CANCELLED
    ├── IdempotencyKeyReused    IDEMPOTENCY_KEY_REUSED    only with strict keys
    ├── RequestIdReused         REQUEST_ID_REUSED
    ├── TooManyJobs             TOO_MANY_JOBS             too many of the user's jobs are alive
    ├── QuotaExceeded           QUOTA_EXCEEDED            too many jobs of the user were created today or this month
    ├── PlatformUnavailable     PLATFORM_UNAVAILABLE      an operator has switched creation off
    ├── JobNotRetryable, RetryInProgress, SnapshotExpired, ExecutorNotFound,
    │   EventNotFound, EventNotDead, EventClaimed, EventNeeded, EventNotDiscardable    operators
    ├── LeaseConflict, LeaseLost, CancelRequested, IllegalTransition, JobNotReady, SessionLost, ClaimLost, NotAttempted
    │                           executor and dispatcher
    ├── Unauthenticated, PermissionDenied
    ├── Unavailable             DATABASE_UNAVAILABLE      nothing was written, or it will be found by its identity
    ├── DeadlineExceeded        DEADLINE_EXCEEDED
    ├── ShuttingDown            SHUTTING_DOWN             ends the streams and long polls of a stopping server
    ├── InternalError           INTERNAL
    └── only made by clients:
        ├── Unreachable         UNREACHABLE               no answer from the address
        ├── ServerBusy          SERVER_BUSY
        ├── Unimplemented       UNIMPLEMENTED             server and client are of different versions
        └── UnknownRefusal      whatever the server said  a reason that this version does not know

The message is public: it holds no addresses, paths or stack traces. What an operator needs goes to the log.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from grpc import StatusCode

DOMAIN = "aijobs"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is not as it must be."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One limit that the request would exceed. The subject is whose limit it is, for example `user:u-1`."""

    subject: str
    description: str


class AijobsError(Exception):
    """Base of all. `advice` tells a person what to do next."""

    reason: str
    status: StatusCode
    advice: str

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        quota_violations: Sequence[QuotaViolation] = (),
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.quota_violations = tuple(quota_violations)
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """True if the same call may well succeed a little later."""
        return self.status in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED) or isinstance(self, ServerBusy)

    @classmethod
    def rebuilt(
        cls,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        quota_violations: Sequence[QuotaViolation] = (),
        retry_after: timedelta | None = None,
    ) -> Self:
        """Build an error from what came over the wire, whatever the constructor of its class asks for."""
        error = cls.__new__(cls)
        AijobsError.__init__(
            error, message, violations=violations, quota_violations=quota_violations, retry_after=retry_after
        )
        return error


class InvalidInput(AijobsError):
    """A field of the request is not as it must be. Nothing was written."""

    reason = "INVALID_INPUT"
    status = StatusCode.INVALID_ARGUMENT
    advice = "Correct the named fields and send the request again."

    @classmethod
    def field(cls, field: str, description: str) -> Self:
        """Build the error for one field."""
        return cls.fields([FieldViolation(field, description)])

    @classmethod
    def fields(cls, violations: Sequence[FieldViolation]) -> Self:
        """Build the error for several fields."""
        return cls.rebuilt("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)


class UnknownJobType(InvalidInput):
    """No definition has this name."""

    reason = "UNKNOWN_JOB_TYPE"
    advice = "List the known types with `aijobs types` (JobAdminService.ListJobTypes)."

    def __init__(self, job_type: str, *, known: Iterable[str]) -> None:
        names = ", ".join(known) or "none"
        description = f"no job type {job_type[:80]!r}; known: {names}"
        super().__init__(f"job_type: {description}", violations=[FieldViolation("job_type", description)])


class PayloadTooLarge(InvalidInput):
    """A field is larger than the engine takes."""

    reason = "PAYLOAD_TOO_LARGE"
    advice = "Send less, or store the content elsewhere and send its id."


class InvalidIdempotencyKey(InvalidInput):
    """The idempotency key has characters or a length that could make two keys one (ruling 15)."""

    reason = "INVALID_IDEMPOTENCY_KEY"
    advice = "Use 1 to 128 printable ASCII characters without blanks, and not `follow-up:` at their beginning."


class JobNotFound(AijobsError):
    """No such job, or it belongs to somebody else (never said which)."""

    reason = "JOB_NOT_FOUND"
    status = StatusCode.NOT_FOUND
    advice = "Check the job id and on whose behalf you ask."

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id[:64]!r}")


class JobNotCancellable(AijobsError):
    """The job has ended, or its type cannot be cancelled."""

    reason = "JOB_NOT_CANCELLABLE"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Nothing to do: read the job's state."


class JobAlreadyCancelled(AijobsError):
    """The job is cancelled already."""

    reason = "JOB_ALREADY_CANCELLED"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Nothing to do."

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} is cancelled already")


class IdempotencyKeyReused(AijobsError):
    """Strict keys were asked for, and the key belongs to a job of another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"
    status = StatusCode.ALREADY_EXISTS
    advice = "Use a new key for a new request, or repeat the first request exactly."


class RequestIdReused(AijobsError):
    """The request id belongs to another request of the same caller."""

    reason = "REQUEST_ID_REUSED"
    status = StatusCode.ALREADY_EXISTS
    advice = "Make a fresh request id for every request; only an exact repeat may carry the same one."

    def __init__(self) -> None:
        super().__init__("request_id: already used for another request")


class TooManyJobs(AijobsError):
    """The user has as many live jobs as one user may have (CR-5). Nothing was written."""

    reason = "TOO_MANY_JOBS"
    status = StatusCode.RESOURCE_EXHAUSTED
    advice = "Wait until some of the user's jobs have ended, or cancel some, and send the request again."


class QuotaExceeded(AijobsError):
    """The user has used up a quota of the day or of the month (CR-5). Nothing was written."""

    reason = "QUOTA_EXCEEDED"
    status = StatusCode.RESOURCE_EXHAUSTED
    advice = "Wait until the quota begins anew, or ask an operator for a larger one."


class PlatformUnavailable(AijobsError):
    """An operator has switched the creation of jobs off (CR-5). Nothing was written."""

    reason = "PLATFORM_UNAVAILABLE"
    status = StatusCode.UNAVAILABLE
    advice = "Try again later; operators: `aijobs platform on` ends it."

    @property
    def transient(self) -> bool:
        """False: it ends when an operator says so, which is not worth waiting for."""
        return False


class JobNotRetryable(AijobsError):
    """Only failed and cancelled jobs can be retried (LC-10, ruling 19)."""

    reason = "JOB_NOT_RETRYABLE"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Create a new job instead, or wait until this one has ended."


class RetryInProgress(AijobsError):
    """A retry of the job has not ended yet (ruling 19)."""

    reason = "RETRY_IN_PROGRESS"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Follow the named job, or cancel it before you retry again."


class SnapshotExpired(AijobsError):
    """The job's input is no longer stored (AP-7)."""

    reason = "SNAPSHOT_EXPIRED"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Create a new job with the input."


class ExecutorNotFound(AijobsError):
    """No executor with this id was seen lately."""

    reason = "EXECUTOR_NOT_FOUND"
    status = StatusCode.NOT_FOUND
    advice = "List the executors with `aijobs executors list` (JobAdminService.ListExecutors)."

    def __init__(self, executor_id: str) -> None:
        super().__init__(f"no executor {executor_id[:128]!r}")


class EventNotFound(AijobsError):
    """No outbox event has this id: it never had, or it was deleted by its age."""

    reason = "EVENT_NOT_FOUND"
    status = StatusCode.NOT_FOUND
    advice = "List the events with `aijobs outbox list` (JobAdminService.ListOutboxEvents)."

    def __init__(self, event_id: str) -> None:
        super().__init__(f"no event {event_id[:64]!r}")


class EventNotDead(AijobsError):
    """Only dead events can be requeued (OB-3). The event stays as it is."""

    reason = "EVENT_NOT_DEAD"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Nothing to do: the event is on its way, was published or was given up; its status says which."


class EventClaimed(AijobsError):
    """A dispatcher is publishing the event at the moment; it may have been sent already."""

    reason = "EVENT_CLAIMED"
    status = StatusCode.ABORTED
    advice = "Ask again when its claim has ended: in a minute at most, unless it is published by then."


class EventNeeded(AijobsError):
    """Without this event a job would wait for ever, so it cannot be discarded (OB-3)."""

    reason = "EVENT_NEEDED"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Requeue the event if it is dead (`aijobs outbox requeue`), or cancel the job (`aijobs jobs cancel`)."


class EventNotDiscardable(AijobsError):
    """The event was published: it cannot be taken back."""

    reason = "EVENT_NOT_DISCARDABLE"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Nothing to do: receivers recognise an event by its id and know that it may come twice."


class JobNotReady(AijobsError):
    """The job cannot start now; it was dispatched again and its message will come another time."""

    reason = "JOB_NOT_READY"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Acknowledge the message and forget it."


class SessionLost(AijobsError):
    """The executor's session is not the present one (LC-8)."""

    reason = "SESSION_LOST"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Open a session and ask again with the same lease token."


class LeaseConflict(AijobsError):
    """Somebody else holds the job's lease."""

    reason = "LEASE_CONFLICT"
    status = StatusCode.ABORTED
    advice = "Acknowledge the message; the holder finishes the job."


class LeaseLost(AijobsError):
    """The attempt or the lease token is not the present one (LC-5)."""

    reason = "LEASE_LOST"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Stop the run at once and report nothing."


class CancelRequested(AijobsError):
    """A cancel was acknowledged: the run can only end cancelled (LC-9)."""

    reason = "CANCEL_REQUESTED"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Stop the run and confirm with a cancelled outcome."


class IllegalTransition(AijobsError):
    """The state machine has no such change (LC-2). The message names both states."""

    reason = "ILLEGAL_TRANSITION"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Read the job's state."


class ClaimLost(AijobsError):
    """The claim on an event had expired and somebody else has it."""

    reason = "CLAIM_LOST"
    status = StatusCode.FAILED_PRECONDITION
    advice = "Drop the event."


class NotAttempted(AijobsError):
    """An item of a batch did not fit."""

    reason = "NOT_ATTEMPTED"
    status = StatusCode.RESOURCE_EXHAUSTED
    advice = "Send the item again in another batch."


class Unauthenticated(AijobsError):
    """No token, or one that does not hold."""

    reason = "UNAUTHENTICATED"
    status = StatusCode.UNAUTHENTICATED
    advice = "Send a valid token: set AIJOBS_TOKEN."


class PermissionDenied(AijobsError):
    """The caller has none of the roles that may call the method."""

    reason = "PERMISSION_DENIED"
    status = StatusCode.PERMISSION_DENIED
    advice = "Use a token with one of the named roles."


class Unavailable(AijobsError):
    """The database cannot be reached. Repeating the request is safe."""

    reason = "DATABASE_UNAVAILABLE"
    status = StatusCode.UNAVAILABLE
    advice = "Try again shortly; operators: see the jobs service's log."


class DeadlineExceeded(AijobsError):
    """The call took longer than its deadline. Repeating it is safe."""

    reason = "DEADLINE_EXCEEDED"
    status = StatusCode.DEADLINE_EXCEEDED
    advice = "Try again with a longer deadline."


class InternalError(AijobsError):
    """A fault of ours. The log has the details."""

    reason = "INTERNAL"
    status = StatusCode.INTERNAL
    advice = "Report it with the time of the call."


class ShuttingDown(AijobsError):
    """The server is stopping and ends its streams and long polls. Repeating or resuming the call is safe."""

    reason = "SHUTTING_DOWN"
    status = StatusCode.UNAVAILABLE
    advice = "Repeat the call: another replica, or this one restarted, answers it."

    def __init__(self) -> None:
        super().__init__("the service is shutting down")


class Unreachable(AijobsError):
    """Nothing answers at the address. Repeating the request is safe."""

    reason = "UNREACHABLE"
    status = StatusCode.UNAVAILABLE
    advice = "Check that the service runs and that AIJOBS_ADDRESS (or --address) names it; `aijobs dev` starts one."

    def __init__(self, address: str, why: str = "") -> None:
        name = f"the service at {address}" if address else "the service"
        super().__init__(f"{name} cannot be reached" + (f": {why}" if why else ""))


class ServerBusy(AijobsError):
    """The server, or what stands in front of it, takes no more calls at the moment."""

    reason = "SERVER_BUSY"
    status = StatusCode.RESOURCE_EXHAUSTED
    advice = "Try again shortly, more slowly."


class Unimplemented(AijobsError):
    """The server does not know the method."""

    reason = "UNIMPLEMENTED"
    status = StatusCode.UNIMPLEMENTED
    advice = "Check that the address is that of the right service, and that its version is not older than the client's."


class UnknownRefusal(AijobsError):
    """An error whose reason this version does not know: a newer server's, or that of a proxy on the way."""

    def __init__(self, message: str, *, reason: str, status: StatusCode, advice: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.advice = advice
