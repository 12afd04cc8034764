"""The role table against the contract itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

from aijobs.rpc.roles import METHOD_ROLES, OPEN_SERVICES, Role, is_open, roles_of
from aijobs.v1 import job_admin_service_pb2, job_service_pb2, lifecycle_service_pb2, outbox_service_pb2

MODULES = (job_admin_service_pb2, job_service_pb2, lifecycle_service_pb2, outbox_service_pb2)


def methods_of_the_contract() -> Iterator[str]:
    pool = descriptor_pool.Default()
    for module in MODULES:
        for service in pool.FindFileByName(module.DESCRIPTOR.name).services_by_name.values():
            yield from (f"{service.full_name}/{method.name}" for method in service.methods)


def test_every_generated_module_with_services_is_enumerated() -> None:
    folder = Path(job_service_pb2.__file__).parent
    found = {path.name.removesuffix(".py") for path in folder.glob("*_service_pb2.py")}
    assert found == {module.__name__.rpartition(".")[2] for module in MODULES}


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    assert set(METHOD_ROLES) == set(methods_of_the_contract())


def test_every_row_lets_somebody_in() -> None:
    assert all(METHOD_ROLES.values())


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("aijobs.v1.JobService/CreateJob", {Role.BACKEND}),
        ("aijobs.v1.JobService/GetJob", {Role.BACKEND, Role.USER, Role.ADMIN}),
        ("aijobs.v1.JobService/WatchJob", {Role.BACKEND, Role.USER, Role.ADMIN}),
        ("aijobs.v1.JobAdminService/ListJobTypes", {Role.ADMIN}),
        ("aijobs.v1.LifecycleService/LockJobs", {Role.EXECUTOR}),
        ("aijobs.v1.OutboxService/ClaimEvents", {Role.DISPATCHER}),
    ],
)
def test_the_table_says_what_the_contract_says(method: str, roles: set[Role]) -> None:
    assert roles_of(method) == roles


def test_an_unknown_method_is_for_nobody() -> None:
    assert roles_of("aijobs.v1.JobService/DropEverything") == frozenset()
    assert not is_open("aijobs.v1.JobService/DropEverything")


def test_health_and_reflection_are_open_and_nothing_of_ours_is() -> None:
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == OPEN_SERVICES
    assert not any(is_open(method) for method in METHOD_ROLES)
