"""Outbox events for operators over real gRPC, from the client to the database: the embedded engine serves them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from aijobs.client import Client
from aijobs.errors import InvalidInput
from aijobs.v1 import job_admin_service_pb2 as admin_pb2
from services.jobs.store import outbox
from services.jobs.store.database import Database
from services.jobs.store.outbox import NewEvent
from services.standalone.engine import embedded

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARKED = "ai.job.praised"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Client, Database]]:
    path: Path = tmp_path_factory.mktemp("engine") / "jobs.db"
    async with embedded(path, asyncio.Event()) as address, Client(address) as client:
        database = Database(f"sqlite+aiosqlite:///{path}")
        yield client, database
        await database.close()


async def park(database: Database, count: int) -> list[str]:
    """Write events that nobody claims."""
    new = [
        NewEvent(
            event_id=(event_id := str(uuid4())),
            event_type=PARKED,
            aggregate_type="AiJob",
            aggregate_id="j-1",
            dedupe_key=f"{PARKED}:{event_id}:1",
            payload_json="{}",
        )
        for _ in range(count)
    ]
    await database.write(lambda tx: outbox.append(tx, new))
    return [event.event_id for event in new]


async def listed(client: Client, **wanted: Any) -> list[admin_pb2.OutboxEventInfo]:
    return [event async for event in client.list_outbox_events(**wanted)]


async def test_a_list_goes_through_all_pages_and_shows_every_field(served) -> None:
    client, database = served
    job = await client.create_and_wait("synthetic", user_id="u-1")
    enqueue = (await listed(client, job_id=job.job_id, event_type="ai.job.enqueue"))[0]
    assert enqueue.status in (admin_pb2.OUTBOX_EVENT_STATUS_PROCESSING, admin_pb2.OUTBOX_EVENT_STATUS_PUBLISHED)
    assert (enqueue.job_id, enqueue.queue) == (job.job_id, "ai-interactive")
    assert enqueue.dedupe_key == f"ai.job.enqueue:{job.job_id}:1"
    assert job.job_id in enqueue.payload_json
    assert enqueue.dispatcher_id
    assert enqueue.HasField("create_time")
    assert not enqueue.HasField("available_time")
    ids = await park(database, 5)
    found = await listed(client, event_type=PARKED, statuses=[admin_pb2.OUTBOX_EVENT_STATUS_PENDING], page_size=2)
    assert [event.event_id for event in found] == ids[::-1]
    counts = await client.count_outbox_events()
    assert [(each.event_type, each.count) for each in counts.parked] == [(PARKED, 5)]
    assert {each.status for each in counts.counts} == set(admin_pb2.OutboxEventStatus.values()) - {0}
    results = await client.discard_outbox_events([*ids, "unknown", "", "x" * 129])
    assert [result.outcome for result in results[:5]] == [admin_pb2.OUTBOX_EVENT_OUTCOME_DISCARDED] * 5
    assert [result.error.reason for result in results[5:]] == ["EVENT_NOT_FOUND", "INVALID_INPUT", "INVALID_INPUT"]
    assert [result.event_id for result in results[:6]] == [*ids, "unknown"]


async def test_ids_beyond_a_hundred_are_answered_as_not_attempted(served) -> None:
    client, _ = served
    results = await client.requeue_outbox_events([f"e-{number}" for number in range(101)])
    assert [result.error.reason for result in results] == ["EVENT_NOT_FOUND"] * 100 + ["NOT_ATTEMPTED"]


async def test_what_a_request_is_about_has_to_be_said_once(served) -> None:
    client, _ = served
    both = admin_pb2.RequeueOutboxEventsRequest(event_ids=["e"], filter=admin_pb2.DeadEvents())
    for call in (
        client.requeue_outbox_events([]),
        client.discard_outbox_events([]),
        client._call(client._admin.RequeueOutboxEvents, both),
        client.requeue_dead_events(queue="has a blank"),
        listed(client, statuses=[99]),
    ):
        with pytest.raises(InvalidInput):
            await call
    assert not (await client.requeue_dead_events()).results


async def test_a_check_says_what_is_wrong_and_repairs_it(served) -> None:
    client, database = served
    assert await client.check_consistency() == admin_pb2.CheckConsistencyResponse()
    ids = await park(database, 1)
    answer = await client.check_consistency(repair=True)
    (finding,) = answer.findings
    assert (finding.kind, finding.repaired) == (admin_pb2.FINDING_KIND_EVENTS_PARKED, False)
    assert PARKED in finding.problem
    assert answer.counts == [admin_pb2.FindingCount(kind=finding.kind, found=1)]
    await client.discard_outbox_events(ids)
    assert not (await client.check_consistency()).findings
