"""Old jobs and inputs go by themselves from a running engine, and callers are told so (OB-10, AP-7)."""

import pytest

from aijobs.errors import JobNotFound, SnapshotExpired
from aijobs.rpc.roles import Role
from aijobs.v1 import job_pb2
from services.jobs.store.tables import job_snapshots
from services.jobs.store.tables import jobs as jobs_table
from tests.acceptance.engine import USER
from tests.acceptance.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENVIRONMENT = {
    "AIJOBS_RETENTION_SECONDS": "0.2",
    "AIJOBS_KEEP_SNAPSHOTS_SECONDS": "1",
    "AIJOBS_KEEP_JOBS_BY_TYPE": '{"synthetic": {"succeeded": 1}}',
}


async def test_a_job_whose_input_has_expired_can_be_read_but_not_retried(engine) -> None:
    job_id = await engine.create(fail_times=1, fail_code="CREDENTIAL_REJECTED")
    assert (await engine.ended(job_id)).state == job_pb2.JOB_STATE_FAILED

    async def expired() -> bool:
        return not await engine.read(job_snapshots, job_id=job_id)

    await until(expired, "the snapshot deleted")
    async with engine.client(Role.ADMIN) as operator:
        with pytest.raises(SnapshotExpired):
            await operator.retry(job_id)
        assert (await operator.get(job_id)).error.code == "CREDENTIAL_REJECTED"


async def test_a_job_that_is_gone_is_not_found_and_its_key_is_free_again(engine) -> None:
    async with engine.client() as client:
        first = (await client.create("synthetic", user_id=USER, input={}, idempotency_key="k")).job.job_id

        async def gone() -> bool:
            return not await engine.read(jobs_table, job_id=first)

        await until(gone, "the job deleted")
        with pytest.raises(JobNotFound):
            await client.get(first)
        again = await client.create("synthetic", user_id=USER, input={}, idempotency_key="k")
        assert again.job.job_id != first
        assert not again.deduplicated
