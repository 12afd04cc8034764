"""Who may call what (AP-1, AP-4): one table, default deny. A test holds it against the descriptors."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a caller is. A token may carry several."""

    BACKEND = "backend"
    USER = "user"
    ADMIN = "admin"
    EXECUTOR = "executor"
    DISPATCHER = "dispatcher"
    LEGACY_BRIDGE = "legacy_bridge"


_BACKEND = frozenset({Role.BACKEND})
_PEOPLE = frozenset({Role.BACKEND, Role.USER, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})
_EXECUTOR = frozenset({Role.EXECUTOR})
_DISPATCHER = frozenset({Role.DISPATCHER})

#: Method, as gRPC paths and grpcurl write it, to the roles that may call it.
METHOD_ROLES: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "aijobs.v1.JobService/CreateJob": _BACKEND,
        "aijobs.v1.JobService/GetJob": _PEOPLE,
        "aijobs.v1.JobService/ListJobs": _PEOPLE,
        "aijobs.v1.JobService/CancelJob": _PEOPLE,
        "aijobs.v1.JobService/WatchJob": _PEOPLE,
        "aijobs.v1.JobAdminService/ListJobTypes": _ADMIN,
        "aijobs.v1.JobAdminService/RetryJob": _ADMIN,
        "aijobs.v1.JobAdminService/ListExecutors": _ADMIN,
        "aijobs.v1.JobAdminService/DrainExecutor": _ADMIN,
        "aijobs.v1.JobAdminService/ListQueues": _ADMIN,
        "aijobs.v1.JobAdminService/PauseQueue": _ADMIN,
        "aijobs.v1.JobAdminService/ResumeQueue": _ADMIN,
        "aijobs.v1.JobAdminService/GetPlatformAvailability": _ADMIN,
        "aijobs.v1.JobAdminService/SetPlatformAvailability": _ADMIN,
        "aijobs.v1.JobAdminService/ListOutboxEvents": _ADMIN,
        "aijobs.v1.JobAdminService/CountOutboxEvents": _ADMIN,
        "aijobs.v1.JobAdminService/RequeueOutboxEvents": _ADMIN,
        "aijobs.v1.JobAdminService/DiscardOutboxEvents": _ADMIN,
        "aijobs.v1.JobAdminService/CheckConsistency": _ADMIN,
        "aijobs.v1.LifecycleService/OpenSession": _EXECUTOR,
        "aijobs.v1.LifecycleService/LockJobs": _EXECUTOR,
        "aijobs.v1.LifecycleService/ExtendLeases": _EXECUTOR,
        "aijobs.v1.LifecycleService/RecordUsage": _EXECUTOR,
        "aijobs.v1.LifecycleService/SubmitOutcomes": _EXECUTOR,
        "aijobs.v1.OutboxService/ClaimEvents": _DISPATCHER,
        "aijobs.v1.OutboxService/SettleEvents": _DISPATCHER,
    }
)

#: Services that need no token: probes and tools have none.
OPEN_SERVICES = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})


def is_open(method: str) -> bool:
    """Tell whether a method may be called without a token."""
    return method.partition("/")[0] in OPEN_SERVICES


def roles_of(method: str) -> frozenset[Role]:
    """Return the roles that may call a method; none for a method that the table does not know."""
    return METHOD_ROLES.get(method, frozenset())
