"""CR-1…CR-4: a create is all or nothing, and a repeat has one effect."""

import asyncio
import json
from datetime import timedelta
from uuid import uuid4

import pytest
from pydantic import BaseModel, JsonValue
from sqlalchemy import text
from structlog.testing import capture_logs

from aijobs.definition import QUEUE_DEFAULTS, Schema
from aijobs.errors import (
    AijobsError,
    IdempotencyKeyReused,
    InvalidIdempotencyKey,
    InvalidInput,
    PayloadTooLarge,
    RequestIdReused,
    Unavailable,
    UnknownJobType,
)
from aijobs.registry import Registry
from aijobs.states import JobState
from services.jobs.creation import DIFFERING_REPEATS, Created, JobCreation
from services.jobs.quotas import Limits, Quotas
from services.jobs.ranking import QueueOrder
from services.jobs.retrying import Retry
from services.jobs.store import outbox
from services.jobs.store.tables import job_history, job_snapshots, jobs, outbox_events, requests
from tests.conformance.conftest import QUANTUM, Jobs, definition, failure, lease_of, new_job

EVERYTHING = (jobs, job_snapshots, job_history, outbox_events, requests)


def nested(depth: int) -> JsonValue:
    """Lists in lists, as deep as JSON may be, or a little deeper."""
    value: JsonValue = []
    for _ in range(depth - 1):
        value = [value]
    return value


async def assert_nothing_written(service: Jobs) -> None:
    for table in EVERYTHING:
        assert await service.rows(table) == [], table.name


async def test_a_create_writes_job_snapshot_history_and_event(jobs: Jobs) -> None:
    created = await jobs.create(input={"number": 3}, labels={"team": "a"}, target_type="answer", target_id="7")
    job = created.job
    assert (job.lifecycle_status, job.attempt, job.sequence, job.queue) == (JobState.QUEUED, 0, 1, "ai-interactive")
    (snapshot,) = await jobs.rows(job_snapshots)
    assert snapshot["content_json"] == '{"number":3,"text":""}'
    (event,) = await jobs.rows(outbox_events)
    assert event["dedupe_key"] == f"ai.job.enqueue:{job.job_id}:1"
    assert json.loads(event["payload_json"]) == {
        "jobId": job.job_id,
        "jobType": "testing",
        "queueName": "ai-interactive",
        "priority": 50,
    }
    assert (event["aggregate_type"], event["aggregate_id"], event["status"]) == ("AiJob", job.job_id, "pending")
    assert await jobs.history(job.job_id) == ["created"]


async def test_when_the_event_cannot_be_inserted_there_is_no_job(jobs: Jobs, monkeypatch) -> None:
    async def broken(tx, new) -> None:
        await tx.execute(text("INSERT INTO no_such_table VALUES (1)"))

    monkeypatch.setattr(outbox, "append", broken)
    with pytest.raises(Unavailable):
        await jobs.create()
    await assert_nothing_written(jobs)


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"job_type": "unheard_of"}, UnknownJobType, "job_type"),
        ({"input": {"number": "many"}}, InvalidInput, "input.number"),
        ({"input": {"unknown": 1}}, InvalidInput, "input.unknown"),
        ({"input": [1]}, InvalidInput, "input"),
        ({"input": {"number": 2**53}}, InvalidInput, "input"),
        ({"input": {"text": nested(101)}}, InvalidInput, "input"),
        ({"input": {"text": nested(99)}}, InvalidInput, "input.text"),
        ({"input": {"text": "x\x00y"}}, InvalidInput, "input"),
        ({"input": {"text": "x" * 1_000_001}}, InvalidInput, "input.text"),
        ({"input": {"text": "ü" * 600_000}}, PayloadTooLarge, "input"),
        ({"user_id": ""}, InvalidInput, "user_id"),
        ({"user_id": "with blank"}, InvalidInput, "user_id"),
        ({"user_id": "x" * 129}, InvalidInput, "user_id"),
        ({"request_id": "ü"}, InvalidInput, "request_id"),
        ({"target_type": "answer"}, InvalidInput, "target"),
        ({"labels": {"Upper": "x"}}, InvalidInput, "labels"),
        ({"labels": {"a": "x" * 257}}, InvalidInput, "labels.a"),
        ({"labels": {f"k{n}": "v" for n in range(17)}}, InvalidInput, "labels"),
        ({"priority": 101}, InvalidInput, "overrides.priority"),
        ({"idempotency_key": "k "}, InvalidIdempotencyKey, "idempotency_key"),
        ({"idempotency_key": "é"}, InvalidIdempotencyKey, "idempotency_key"),
        ({"idempotency_key": "\N{GRINNING FACE}"}, InvalidIdempotencyKey, "idempotency_key"),
        ({"idempotency_key": "k" * 129}, InvalidIdempotencyKey, "idempotency_key"),
    ],
)
async def test_a_bad_request_names_the_field_and_writes_nothing(jobs: Jobs, changes, error, field) -> None:
    (result,) = await jobs.creation.create("backend", [new_job(**changes)])
    assert isinstance(result, AijobsError)
    assert type(result) is error
    assert [violation.field for violation in result.violations] == [field]
    await assert_nothing_written(jobs)


async def test_the_same_key_finds_the_first_job(jobs: Jobs) -> None:
    first = await jobs.create(idempotency_key="order-1")
    again = await jobs.create(idempotency_key="order-1")
    assert (first.deduplicated, again.deduplicated, again.request_differs) == (False, True, False)
    assert again.job.job_id == first.job.job_id


async def test_a_key_with_another_request_is_told_or_refused(jobs: Jobs) -> None:
    first = await jobs.create(idempotency_key="order-1")
    other = await jobs.create(idempotency_key="order-1", input={"text": "other"})
    assert (other.deduplicated, other.request_differs, other.job.job_id) == (True, True, first.job.job_id)
    (strict,) = await jobs.creation.create(
        "backend", [new_job(idempotency_key="order-1", input={"text": "third"}, strict_idempotency=True)]
    )
    assert isinstance(strict, IdempotencyKeyReused)


async def test_keys_are_case_exact_and_belong_to_user_and_type(jobs: Jobs) -> None:
    requests_made = [
        {"idempotency_key": "Order-1"},
        {"idempotency_key": "order-1"},
        {"idempotency_key": "ORDER-1"},
        {"idempotency_key": "order-1", "user_id": "User-1"},
        {"idempotency_key": "order-1", "job_type": "fixed"},
    ]
    ids = {(await jobs.create(**changes)).job.job_id for changes in requests_made}
    assert len(ids) == len(requests_made)


async def test_without_a_key_every_create_makes_a_job(jobs: Jobs) -> None:
    assert (await jobs.create()).job.job_id != (await jobs.create()).job.job_id


async def test_a_repeated_request_id_gets_the_same_answer(jobs: Jobs) -> None:
    first = await jobs.create(request_id="r1")
    again = await jobs.create(request_id="r1")
    assert again == first or (again.job.job_id, again.deduplicated) == (first.job.job_id, False)
    assert len(await jobs.rows(outbox_events)) == 1


async def test_a_request_id_with_another_request_is_refused(jobs: Jobs) -> None:
    await jobs.create(request_id="r1")
    (result,) = await jobs.creation.create("backend", [new_job(request_id="r1", input={"text": "other"})])
    assert isinstance(result, RequestIdReused)


async def test_a_repeat_after_an_upgrade_with_other_defaults_is_still_the_same_request(jobs: Jobs) -> None:
    class NewInput(BaseModel):
        text: str = ""
        number: int = 7

    newer = definition().model_copy(update={"input": Schema(version="2", model=NewInput)})
    upgraded = JobCreation(jobs.database, Registry([newer]), jobs.wakeups, Quotas(Limits()), QueueOrder(QUANTUM))
    first = await jobs.create(request_id="r1", idempotency_key="k")
    (again,) = await upgraded.create("backend", [new_job(request_id="r1", idempotency_key="k")])
    (by_key,) = await upgraded.create("backend", [new_job(request_id="r2", idempotency_key="k")])
    assert isinstance(again, Created)
    assert isinstance(by_key, Created)
    assert again.job.job_id == by_key.job.job_id == first.job.job_id
    assert not by_key.request_differs


async def test_request_ids_belong_to_their_caller(jobs: Jobs) -> None:
    first = await jobs.create(request_id="r1", caller="backend-a")
    other = await jobs.create(request_id="r1", caller="backend-b")
    assert first.job.job_id != other.job.job_id


async def test_concurrent_creates_with_one_key_make_one_job(jobs: Jobs) -> None:
    """Case D1 in short: 50 creates at once, put in line by the user's row instead of failing on the key."""
    with capture_logs() as logs:
        results = await asyncio.gather(
            *(jobs.creation.create("backend", [new_job(idempotency_key="k")]) for _ in range(50))
        )
    assert logs == [], "none had to be repeated"
    created = [result for (result,) in results if isinstance(result, Created)]
    assert len(created) == len(results)
    assert len({result.job.job_id for result in created}) == 1
    assert sum(not result.deduplicated for result in created) == 1
    assert len(await jobs.rows(outbox_events)) == 1


async def test_a_batch_answers_each_request_by_itself(jobs: Jobs) -> None:
    batch = [
        new_job(idempotency_key="a"),
        new_job(job_type="unheard_of"),
        new_job(idempotency_key="a"),
        new_job(user_id="user-2"),
        new_job(request_id="same"),
        new_job(request_id="same"),
    ]
    results = await jobs.creation.create("backend", batch)
    assert [isinstance(result, AijobsError) for result in results] == [False, True, False, False, False, False]
    good = [result for result in results if isinstance(result, Created)]
    assert good[1].deduplicated
    assert good[0].job.job_id == good[1].job.job_id
    assert good[3].job.job_id == good[4].job.job_id
    assert len(await jobs.rows(outbox_events)) == 3


async def test_creates_of_many_users_in_opposite_orders_do_not_deadlock(jobs: Jobs) -> None:
    users = [f"user-{n}" for n in range(8)]

    async def batch(order: list[str]) -> None:
        results = await jobs.creation.create("backend", [new_job(user_id=user) for user in order])
        assert all(isinstance(result, Created) for result in results)

    await asyncio.gather(*(batch(users if n % 2 else users[::-1]) for n in range(10)))


async def test_validating_only_writes_nothing(jobs: Jobs) -> None:
    await jobs.creation.check(new_job())
    with pytest.raises(InvalidInput):
        await jobs.creation.check(new_job(input={"number": "x"}))
    await assert_nothing_written(jobs)


async def test_ids_rise_with_time(jobs: Jobs) -> None:
    ids = [(await jobs.create(request_id=uuid4().hex)).job.job_id for _ in range(5)]
    assert ids == sorted(ids)


async def test_repeats_that_ask_for_something_else_are_counted(jobs: Jobs) -> None:
    """CR-2: somebody's keys are not what they should be, and nobody is told by an error."""

    def counted() -> float:
        return float(DIFFERING_REPEATS.labels("testing")._value.get())

    before = counted()
    await jobs.create(idempotency_key="k")
    await jobs.create(idempotency_key="k")
    await jobs.create(idempotency_key="k", input={"text": "other"})
    await jobs.creation.create(
        "backend", [new_job(idempotency_key="k", input={"text": "other"}, strict_idempotency=True)]
    )
    assert counted() == before + 2


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_trace_goes_along_with_every_event_and_makes_no_other_request(jobs: Jobs) -> None:
    """OB-1: also with those of what follows from the job."""
    created = await jobs.create(idempotency_key="k", trace_context=TRACE)
    (again,) = await jobs.creation.create("backend", [new_job(idempotency_key="k", trace_context=None)])
    assert isinstance(again, Created)
    assert (again.deduplicated, again.request_differs) == (True, False)
    assert [event.trace_context for event in await jobs.claim()] == [TRACE]
    locked = await jobs.lock(created.job.job_id)
    await jobs.submit(lease_of(locked), failure("CREDENTIAL_REJECTED"))
    await jobs.retrying.retry("operator", Retry(request_id="r", job_id=created.job.job_id, reason=""))
    events = await jobs.rows(outbox_events)
    assert [row["trace_context"] for row in events] == [TRACE] * 3
    await jobs.create()
    assert (await jobs.rows(outbox_events, "id"))[-1]["trace_context"] is None


async def test_a_queue_gives_what_a_definition_leaves_out(jobs: Jobs) -> None:
    """QU-1: its numbers are the settings', and are frozen in the job."""
    told = {
        queue: defaults.model_copy(update={"attempts": 7, "backoff": timedelta(seconds=9)})
        for queue, defaults in QUEUE_DEFAULTS.items()
    }
    registry = Registry([definition("silent", max_retries=None), definition("own", max_retries=1)]).filled(told)
    creation = JobCreation(
        jobs.database, registry, jobs.wakeups, Quotas(Limits(live=100), {}), QueueOrder(timedelta(seconds=1))
    )
    created = await creation.create("backend", [new_job(job_type="silent"), new_job(job_type="own")])
    assert [(item.job.max_retries, item.job.backoff_ms) for item in created if isinstance(item, Created)] == [
        (6, 9000),
        (1, 9000),
    ]
