"""What other backends hear of the end of a job, read from a real broker as they would (OB-8)."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest
import pytest_asyncio
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from jsonschema import Draft202012Validator

from aijobs.completion import EXCHANGE, ROUTING_KEYS, CompletionEvent
from aijobs.states import JobState
from deploy import completion_schema
from tests.acceptance.engine import USER, Engine
from tests.acceptance.waiting import WITHIN

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = json.loads(completion_schema.PAGE.read_text())
WRITTEN_BY_THE_USER = "a secret of the user"


@pytest_asyncio.fixture(loop_scope="module")
async def arriving(engine: Engine) -> AsyncIterator[AbstractQueue]:
    connection = await aio_pika.connect(engine.connections.broker_url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("of-the-test", exclusive=True)
        for key in ROUTING_KEYS.values():
            await queue.bind(EXCHANGE, routing_key=key)
        yield queue


async def ended(engine: Engine, state: JobState) -> str:
    wanted: dict[str, Any] = {"echo": WRITTEN_BY_THE_USER}
    if state == JobState.FAILED:
        wanted |= {"fail_times": 1, "fail_code": "CREDENTIAL_REJECTED"}
    if state == JobState.CANCELLED:
        wanted |= {"sleep_ms": 60_000}
    job_id = await engine.create(**wanted)
    if state == JobState.CANCELLED:
        await engine.changes(job_id, upto="locked")
        async with engine.client() as client:
            await client.cancel(job_id, reason=WRITTEN_BY_THE_USER)
    return job_id


@pytest.mark.parametrize("state", ROUTING_KEYS)
async def test_each_end_of_a_job_is_told_by_a_message_that_fits_the_schema(engine, arriving, state) -> None:
    job_id = await ended(engine, state)
    message = await one(arriving)
    body = json.loads(message.body)
    Draft202012Validator(SCHEMA).validate(body)
    assert set(body) == set(SCHEMA["properties"]), "what is sent is listed, all of it"
    event = CompletionEvent.model_validate_json(message.body)
    row = await engine.row(job_id)
    assert event == CompletionEvent(
        event_id=event.event_id,
        job_id=job_id,
        job_type="synthetic",
        state=state,
        error_code="CREDENTIAL_REJECTED" if state == JobState.FAILED else None,
        output_hash=row["output_hash"],
        sequence=row["sequence"],
        occurred_at=row["finished_at"],
    )
    assert (message.exchange, message.routing_key) == (EXCHANGE, ROUTING_KEYS[state])
    assert (message.message_id, message.correlation_id) == (event.event_id, job_id)
    assert (message.content_type, message.delivery_mode) == ("application/json", aio_pika.DeliveryMode.PERSISTENT)
    assert USER.encode() not in message.body
    assert WRITTEN_BY_THE_USER.encode() not in message.body


async def one(queue: AbstractQueue) -> AbstractIncomingMessage:
    async with asyncio.timeout(WITHIN.total_seconds()), queue.iterator(no_ack=True) as messages:
        return await anext(aiter(messages))
