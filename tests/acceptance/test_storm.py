"""All three services killed at random under load: every job that was created ends once, with one set of artifacts."""

import asyncio
import random
from collections.abc import Sequence
from datetime import timedelta

import pytest

from aijobs.rpc.roles import Role
from aijobs.v1 import job_admin_service_pb2
from services.jobs.store.tables import job_artifacts, job_history, jobs, outbox_events
from tests.acceptance.engine import Engine
from tests.acceptance.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ENVIRONMENT = {
    "AIJOBS_CLAIM_SECONDS": "3",
    "AIJOBS_CLAIM_RELEASE_SECONDS": "0.2",
    # A jobs replica and an executor may die together, and then only the lease tells.
    "AIJOBS_LEASE_SECONDS": "3",
    "AIJOBS_LEASE_GRACE_SECONDS": "1",
    "AIJOBS_HEARTBEAT_SECONDS": "0.5",
    "AIJOBS_REAP_SECONDS": "0.5",
    "AIJOBS_SWEEP_SECONDS": "1",
    "AIJOBS_SWEEP_PATIENCE_SECONDS": "2",
    # Here the processes die more often than any job could be to blame for.
    "AIJOBS_MOST_TAKEOVERS": "100",
    "AIJOBS_SLOTS_INTERACTIVE": "16",
}
AT_A_TIME = 8


async def create_all(engine: Engine, count: int) -> Sequence[str]:
    """Create jobs, a few at a time; the client repeats each request until it is answered."""
    places = asyncio.Semaphore(AT_A_TIME)
    async with engine.client(patience=timedelta(seconds=120)) as client:

        async def create(number: int) -> str:
            async with places:
                answer = await client.create("synthetic", user_id=f"user-{number % 20}", input={"sleep_ms": 20})
                return answer.job.job_id

        return await asyncio.gather(*map(create, range(count)))


async def kill_at_random(engine: Engine, choice: random.Random) -> None:
    """Kill one of the three, start it again, and go on; the time it is away and the time it lives vary."""
    while True:
        victim = choice.choice(engine.processes)
        await victim.kill()
        await asyncio.sleep(choice.uniform(0, 0.3))
        await victim.start()
        await asyncio.sleep(choice.uniform(0, 0.8))


@pytest.mark.parametrize(("count", "seed"), [(150, 1), pytest.param(2000, 2, marks=pytest.mark.long, id="long")])
async def test_every_job_ends_exactly_once(engine: Engine, count: int, seed: int) -> None:
    # The first kill is no chance: it strikes a run.
    struck = await engine.create(sleep_ms=2_000)
    await engine.changes(struck, upto="locked")
    await engine.executor.kill()
    await engine.executor.start()
    killing = asyncio.create_task(kill_at_random(engine, random.Random(seed)))
    try:
        ids = await create_all(engine, count)
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    await engine.heal()

    async def all_ended() -> bool:
        return all(row["finished_at"] is not None for row in await engine.read(jobs))

    async def all_published() -> bool:
        return all(row["status"] == "published" for row in await engine.read(outbox_events))

    await until(all_ended, "every job has ended", within=timedelta(seconds=120))
    await until(all_published, "every event is published", within=timedelta(seconds=30))
    rows = {row["job_id"]: row for row in await engine.read(jobs)}
    assert set(ids) <= set(rows)
    assert len(set(ids)) == count, "no request made two jobs of one"
    mine = [rows[job_id] for job_id in [struck, *ids]]
    assert {row["lifecycle_status"] for row in mine} == {"succeeded"}
    kinds: dict[str, list[str]] = {}
    for entry in await engine.read(job_history):
        kinds.setdefault(entry["job_id"], []).append(entry["kind"])
    assert [job_id for job_id in kinds if (kinds[job_id][0], kinds[job_id][-1]) != ("created", "succeeded")] == []
    assert [job_id for job_id in kinds if kinds[job_id].count("succeeded") != 1] == []
    assert "taken_over" in kinds[struck], "no executor died with a run in hand"
    artifacts = [row["job_id"] for row in await engine.read(job_artifacts)]
    assert sorted(artifacts) == sorted(row["job_id"] for row in rows.values())
    ends = [row for row in await engine.read(outbox_events) if row["event_type"] == "ai.job.completed"]
    assert len(ends) == len(rows)
    async with engine.client(Role.ADMIN) as client:
        assert await client.check_consistency() == job_admin_service_pb2.CheckConsistencyResponse()
