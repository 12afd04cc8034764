"""`aijobs outbox …` as a process against a real server."""

import json

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from aijobs.v1 import job_admin_service_pb2 as admin_pb2
from aijobs.v1 import lifecycle_service_pb2
from tests.integration.cli.program import Ended, aijobs
from tests.integration.rpc.serving import ScriptedAdmin, serving

NINE = Timestamp(seconds=1_800_003_600)
DEAD = admin_pb2.OutboxEventInfo(
    event_id="e-1",
    event_type="ai.job.enqueue",
    job_id="j-1",
    status=admin_pb2.OUTBOX_EVENT_STATUS_DEAD,
    queue="ai-background",
    attempts=3,
    last_error="DISPATCH_REFUSED",
    create_time=NINE,
)
COUNTS = admin_pb2.CountOutboxEventsResponse(
    counts=[
        admin_pb2.OutboxEventCount(status=admin_pb2.OUTBOX_EVENT_STATUS_PENDING, count=10_000),
        admin_pb2.OutboxEventCount(status=admin_pb2.OUTBOX_EVENT_STATUS_DEAD, count=1),
        admin_pb2.OutboxEventCount(status=admin_pb2.OUTBOX_EVENT_STATUS_PUBLISHED, count=7),
    ],
    parked=[admin_pb2.OutboxEventCount(event_type="ai.job.praised", count=2)],
)
ALL = (
    "in all: 0 scheduled, 10,000 or more pending, 0 processing, 1 dead, "
    "2 of type ai.job.praised that no dispatcher can send"
)
REQUEUED = admin_pb2.OutboxEventResult(event_id="e-1", job_id="j-1", outcome=admin_pb2.OUTBOX_EVENT_OUTCOME_REQUEUED)
DISCARDED = admin_pb2.OutboxEventResult(event_id="e-2", job_id="j-2", outcome=admin_pb2.OUTBOX_EVENT_OUTCOME_DISCARDED)
KEPT = admin_pb2.OutboxEventResult(
    event_id="e-3",
    error=lifecycle_service_pb2.ItemError(reason="EVENT_NOT_FOUND", message="no event 'e-3'"),
)


async def asking(admin: ScriptedAdmin, *arguments: str) -> Ended:
    async with serving(admin=admin) as address:
        return await aijobs(*arguments, AIJOBS_ADDRESS=address)


async def test_events_are_listed_with_how_many_wait() -> None:
    admin = ScriptedAdmin(ListOutboxEvents=admin_pb2.ListOutboxEventsResponse(events=[DEAD]), CountOutboxEvents=COUNTS)
    filters = ("--status", "dead", "--type", "ai.job.enqueue", "--queue", "ai-background", "--job", "j-1")
    ended = await asking(admin, "outbox", "list", *filters)
    assert (ended.status, ended.err) == (0, ALL + "\n")
    assert [" ".join(line.split()) for line in ended.out.splitlines()] == [
        "EVENT TYPE JOB STATUS QUEUE ATTEMPTS ERROR CREATED",
        "e-1 ai.job.enqueue j-1 dead ai-background 3 DISPATCH_REFUSED 2027-01-15 09:00:00Z",
    ]
    assert admin.requests[0] == admin_pb2.ListOutboxEventsRequest(
        statuses=[admin_pb2.OUTBOX_EVENT_STATUS_DEAD],
        event_type="ai.job.enqueue",
        job_id="j-1",
        queue="ai-background",
        page_size=20,
    )


async def test_no_events_are_no_error() -> None:
    ended = await asking(ScriptedAdmin(), "outbox", "list")
    assert (ended.status, ended.out) == (0, "")
    assert ended.err.startswith("no such events\nin all: 0 scheduled")


async def test_a_list_for_programs_is_the_events_alone() -> None:
    admin = ScriptedAdmin(ListOutboxEvents=admin_pb2.ListOutboxEventsResponse(events=[DEAD]))
    ended = await asking(admin, "outbox", "list", "--json")
    event = json.loads(ended.out)
    assert (event["event_id"], event["status"], event["attempts"]) == ("e-1", "OUTBOX_EVENT_STATUS_DEAD", 3)
    assert len(admin.requests) == 1


async def test_a_status_that_is_none_is_refused() -> None:
    ended = await asking(ScriptedAdmin(), "outbox", "list", "--status", "lost")
    assert ended.status == 2
    assert "'lost'" in ended.err


async def test_a_requeue_says_what_became_of_each_event_and_fails_if_any_stays() -> None:
    answer = admin_pb2.RequeueOutboxEventsResponse(results=[REQUEUED, DISCARDED, KEPT])
    admin = ScriptedAdmin(RequeueOutboxEvents=answer)
    ended = await asking(admin, "outbox", "requeue", "e-1", "e-2", "e-3")
    assert ended == Ended(
        status=4,
        out=(
            "event e-1 of job j-1 is requeued\n"
            "event e-2 of job j-2 is discarded: nobody waits for it\n"
            "event e-3 stays as it is: no event 'e-3' (EVENT_NOT_FOUND)\n"
        ),
        err="",
    )
    assert admin.requests == [admin_pb2.RequeueOutboxEventsRequest(event_ids=["e-1", "e-2", "e-3"])]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--all",), admin_pb2.DeadEvents()),
        (("--type", "t", "--queue", "q", "--job", "j"), admin_pb2.DeadEvents(event_type="t", queue="q", job_id="j")),
    ],
)
async def test_a_requeue_by_filter_can_be_tried_first(arguments, wanted) -> None:
    admin = ScriptedAdmin(RequeueOutboxEvents=admin_pb2.RequeueOutboxEventsResponse(results=[REQUEUED], more=True))
    ended = await asking(admin, "outbox", "requeue", "--dry-run", *arguments)
    assert ended == Ended(
        status=0, out="event e-1 of job j-1 would be requeued\n", err="there are more: these are the oldest 1\n"
    )
    assert admin.requests == [admin_pb2.RequeueOutboxEventsRequest(filter=wanted, dry_run=True)]


@pytest.mark.parametrize("arguments", [(), ("e-1", "--all"), ("--all", "--queue", "q")], ids=" ".join)
async def test_a_requeue_of_nothing_in_particular_is_refused(arguments) -> None:
    admin = ScriptedAdmin()
    ended = await asking(admin, "outbox", "requeue", *arguments)
    assert (ended.status, ended.out, admin.requests) == (2, "", [])


async def test_more_than_a_hundred_events_are_discarded_in_several_calls() -> None:
    admin = ScriptedAdmin(DiscardOutboxEvents=admin_pb2.DiscardOutboxEventsResponse(results=[DISCARDED]))
    ended = await asking(admin, "outbox", "discard", *(f"e-{number}" for number in range(101)), "--json")
    assert [json.loads(line)["outcome"] for line in ended.out.splitlines()] == ["OUTBOX_EVENT_OUTCOME_DISCARDED"] * 2
    assert [len(request.event_ids) for request in admin.requests] == [100, 1]
