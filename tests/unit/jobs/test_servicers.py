"""The servicers against the generated stubs, which answer UNIMPLEMENTED to whatever is not overridden."""

import pytest

from services.jobs.rpc.job_admin_servicer import JobAdminServicer
from services.jobs.rpc.job_servicer import JobServicer
from services.jobs.rpc.lifecycle_servicer import LifecycleServicer
from services.jobs.rpc.outbox_servicer import OutboxServicer


@pytest.mark.parametrize("servicer", [JobAdminServicer, JobServicer, LifecycleServicer, OutboxServicer])
def test_every_method_of_the_contract_is_implemented(servicer: type) -> None:
    stub = servicer.__mro__[-2]
    methods = [name for name in vars(stub) if not name.startswith("_")]
    assert methods
    assert [name for name in methods if getattr(servicer, name) is getattr(stub, name)] == []
