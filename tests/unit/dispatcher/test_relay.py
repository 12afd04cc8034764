"""OB-2, OB-4: what the relay does when broker or jobs service fail, on a real outbox in SQLite."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta

import pytest

from aijobs.backoff import Backoff
from aijobs.broker.port import BrokerUnavailable, Message, MessageRefused, QueueMissing
from aijobs.errors import Unreachable
from services.dispatcher import relay as relay_module
from services.dispatcher.messages import SENDABLE, ClaimedEvent
from services.dispatcher.relay import Claim, Published, PublishFailed, Relay, Released, Settlement
from services.jobs import outbox as jobs_outbox
from services.jobs.migrate import upgrade_with
from services.jobs.outbox import SettleRequest
from services.jobs.store.database import Database
from services.jobs.store.tables import outbox_events
from tests.conformance.conftest import Jobs

RESULTS: dict[type, jobs_outbox.Published | jobs_outbox.PublishFailed | jobs_outbox.Released] = {
    Published: jobs_outbox.Published(),
    PublishFailed: jobs_outbox.PublishFailed(reason="DISPATCH_TESTED", retryable=True),
    Released: jobs_outbox.Released(),
}


class Outbox:
    """The relay's port on a real outbox, failing when told to."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.claims = 0
        self.failing_settles = 0
        self.settled = asyncio.Event()

    async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
        self.claims += 1
        rows = await self.jobs.claim(claim_token, limit=limit, wait=wait, ready=ready, event_types=list(SENDABLE))
        wanted = [field.name for field in fields(ClaimedEvent)]
        events = [ClaimedEvent(**{name: getattr(row, name) for name in wanted}) for row in rows]
        return Claim(events=events, lease=timedelta(seconds=60))

    async def held(self, claim_token: str) -> Claim:
        return await Outbox.claim(self, claim_token, 0, timedelta(0), {})

    async def close(self) -> None:
        pass

    async def settle(self, claim_token: str, settlements: Sequence[Settlement]) -> Sequence[str]:
        if self.failing_settles:
            self.failing_settles -= 1
            raise Unreachable("gone")
        batch = [SettleRequest(event_id=item.event_id, result=RESULTS[type(item.result)]) for item in settlements]
        results = await self.jobs.outbox.settle(claim_token, batch)
        self.settled.set()
        return [item.event_id for item, result in zip(settlements, results, strict=True) if result is not None]


class Publisher:
    """A publisher that fails as scripted and otherwise keeps what it is given."""

    def __init__(self) -> None:
        self.published: list[Message] = []
        self.failures: list[Exception] = []
        self.unreachable = 0
        self.arrived = asyncio.Event()

    async def connect(self) -> None:
        if self.unreachable:
            self.unreachable -= 1
            raise BrokerUnavailable("down")

    async def publish(self, message: Message, within: timedelta) -> None:
        del within
        if self.failures:
            raise self.failures.pop(0)
        self.published.append(message)
        self.arrived.set()

    async def depths(self, within: timedelta) -> Mapping[str, int]:
        del within
        return {}

    async def close(self) -> None:
        pass


@pytest.fixture
async def jobs(tmp_path, monkeypatch) -> AsyncIterator[Jobs]:
    monkeypatch.setattr(relay_module, "Backoff", lambda: Backoff(timedelta(milliseconds=5)))
    url = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    await upgrade_with(url)
    database = Database(url)
    jobs = Jobs(database)
    promoting = asyncio.create_task(jobs.promotion.run())
    yield jobs
    promoting.cancel()
    await asyncio.gather(promoting, return_exceptions=True)
    await database.close()


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(30):
        yield


@pytest.fixture
def outbox(jobs: Jobs) -> Outbox:
    return Outbox(jobs)


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
async def relaying(outbox: Outbox, publisher: Publisher) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(Relay(outbox, publisher, claim_size=10).run())
    async with asyncio.timeout(20):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(outbox: Outbox, *statuses: str) -> None:
    """Wait until the events are at these statuses and attempts ("scheduled 1"), looking after every settle."""
    async with asyncio.timeout(10):
        while True:
            outbox.settled.clear()
            rows = await outbox.jobs.rows(outbox_events, "id")
            found = [f"{row['status']} {row['attempt_count']}" for row in rows]
            if found == list(statuses):
                return
            await outbox.settled.wait()


async def test_events_are_published_and_settled(jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying) -> None:
    created = await jobs.create()
    await until(outbox, "published 0")
    (message,) = publisher.published
    (row,) = await jobs.rows(outbox_events)
    assert (message.queue, message.message_id) == ("ai-interactive", row["event_id"])
    assert message.correlation_id == created.job.job_id


async def test_an_outage_costs_no_attempt_and_the_message_keeps_its_id(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    publisher.failures = [BrokerUnavailable("no confirm")] * 2
    await jobs.create()
    await until(outbox, "published 0")
    (row,) = await jobs.rows(outbox_events)
    assert (row["attempt_count"], row["event_id"]) == (0, publisher.published[0].message_id)


async def test_a_broker_that_takes_nothing_is_no_hot_loop_and_not_working_until_it_does(
    jobs: Jobs, outbox: Outbox, publisher: Publisher
) -> None:
    """OB-4: claiming pauses, and readiness tells the truth, in both directions."""
    relay = Relay(outbox, publisher, claim_size=10)
    task = asyncio.create_task(relay.run())
    await jobs.create()
    await until(outbox, "published 0")
    await relay.working.wait()
    publisher.failures = [BrokerUnavailable("nack")] * 2
    outbox.claims = 0
    await jobs.create()
    await stopped_working(relay)
    await until(outbox, "published 0", "published 0")
    await relay.working.wait()
    assert outbox.claims < 50
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stopped_working(relay: Relay) -> None:
    """Wait until the relay says that it does not work; an Event cannot be awaited the other way round."""
    async with asyncio.timeout(10):
        while relay.working.is_set():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)


async def test_one_event_that_cannot_be_sent_holds_up_nobody(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    good = Publisher.publish

    async def picky(message: Message, within: timedelta) -> None:
        if message.correlation_id == stuck:
            raise QueueMissing("no such queue here")
        await good(publisher, message, within)

    publisher.publish = picky  # type: ignore[method-assign]  # as scripted
    stuck = (await jobs.create()).job.job_id
    for _ in range(5):
        await jobs.create()
    await until(outbox, "scheduled 0", *["published 0"] * 5)


async def test_nothing_is_claimed_while_the_broker_is_away(jobs: Jobs, outbox: Outbox, publisher: Publisher) -> None:
    publisher.unreachable = 3
    await jobs.create()
    task = asyncio.create_task(Relay(outbox, publisher, claim_size=10).run())
    await until(outbox, "published 0")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert outbox.claims <= 3, "three failed connects made no claim"
    assert publisher.unreachable == 0


async def test_a_refused_event_uses_up_its_attempts_and_blocks_nobody(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    publisher.failures = [MessageRefused("too large")]
    await jobs.create()
    await until(outbox, "scheduled 1")
    (row,) = await jobs.rows(outbox_events)
    assert (row["attempt_count"], row["last_error"]) == (1, "DISPATCH_TESTED")
    await jobs.create()
    await until(outbox, "scheduled 1", "published 0")


async def test_an_event_without_what_a_message_needs_is_its_own_fault(
    jobs: Jobs, outbox: Outbox, publisher: Publisher
) -> None:
    await jobs.create()

    async def spoil(tx) -> None:
        await tx.execute(outbox_events.update().values(payload_json="{}"))

    await jobs.database.write(spoil)
    task = asyncio.create_task(Relay(outbox, publisher, claim_size=10).run())
    await until(outbox, "scheduled 1")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (row,) = await jobs.rows(outbox_events)
    assert (row["attempt_count"], row["last_error"]) == (1, "DISPATCH_TESTED")


async def test_a_settle_whose_answer_is_lost_is_repeated(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    outbox.failing_settles = 3
    await jobs.create()
    await until(outbox, "published 0")
    assert len(publisher.published) == 1, "settled late, but not published twice"


async def test_stopping_finishes_the_batch_in_hand(jobs: Jobs, outbox: Outbox) -> None:
    class SlowPublisher(Publisher):
        async def publish(self, message: Message, within: timedelta) -> None:
            del within
            self.arrived.set()
            await release.wait()
            self.published.append(message)

    publisher, release = SlowPublisher(), asyncio.Event()
    task = asyncio.create_task(Relay(outbox, publisher, claim_size=10).run())
    await jobs.create()
    await publisher.arrived.wait()
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["status"] for row in await jobs.rows(outbox_events)] == ["published"]


async def test_stopping_does_not_wait_for_a_jobs_service_that_is_away(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "FINISH_WITHIN", timedelta(milliseconds=50))
    outbox.failing_settles = 10**6
    await jobs.create()
    task = asyncio.create_task(Relay(outbox, publisher, claim_size=10).run())
    await publisher.arrived.wait()
    task.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_stopping_gives_back_what_the_open_claim_had_got(
    jobs: Jobs, outbox: Outbox, publisher: Publisher
) -> None:
    """The claim commits although its caller is gone: without the give-back the event would wait for the claim's end."""

    class LateAnswer(Outbox):
        async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
            first = not self.claims
            answer = await super().claim(claim_token, limit, wait, ready)
            if first:
                self.answered.set()
                await asyncio.Event().wait()
            return answer

        answered = asyncio.Event()

    late = LateAnswer(jobs)
    await jobs.create()
    task = asyncio.create_task(Relay(late, publisher, claim_size=10).run())
    await late.answered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["status"] for row in await jobs.rows(outbox_events)] == ["scheduled"]
    assert publisher.published == []


async def test_the_message_of_an_enqueue_event_is_the_documented_one(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    """OB-9."""
    created = await jobs.create()
    await until(outbox, "published 0")
    body = json.loads(publisher.published[0].body)
    assert list(body) == ["jobId", "jobType", "idempotencyKey", "createdAt"]
    assert body["idempotencyKey"] == f"ai.job.enqueue:{created.job.job_id}:1"


async def test_a_claim_whose_replica_died_after_its_commit_is_carried_on_through_another(
    jobs: Jobs, publisher: Publisher
) -> None:
    """Else its events wait for the claim's end, and count as claimed meanwhile."""

    class Dying(Outbox):
        async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
            answer = await super().claim(claim_token, limit, wait, ready)
            if answer.events:
                raise Unreachable("killed before it answered")
            return answer

    dying = Dying(jobs)
    await jobs.create()
    task = asyncio.create_task(Relay(dying, publisher, claim_size=10).run())
    await until(dying, "published 0")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(publisher.published) == 1


async def test_stopping_claims_nothing_new(jobs: Jobs, outbox: Outbox, publisher: Publisher) -> None:
    """The open claim holds nothing, and events come while it is given back."""
    waiting = asyncio.Event()

    class Waiting(Outbox):
        async def claim(self, claim_token: str, limit: int, wait: timedelta, ready: Mapping[str, int]) -> Claim:
            waiting.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]  # never answered

    task = asyncio.create_task(Relay(Waiting(jobs), publisher, claim_size=10).run())
    await waiting.wait()
    await jobs.create()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["status"] for row in await jobs.rows(outbox_events)] == ["pending"]


async def test_an_event_at_which_publishing_itself_breaks_costs_the_others_nothing(
    jobs: Jobs, outbox: Outbox, publisher: Publisher, relaying
) -> None:
    good = Publisher.publish

    async def broken(message: Message, within: timedelta) -> None:
        if message.correlation_id == bad:
            raise ZeroDivisionError
        await good(publisher, message, within)

    publisher.publish = broken  # type: ignore[method-assign]  # as scripted
    bad = (await jobs.create()).job.job_id
    for _ in range(3):
        await jobs.create()
    await until(outbox, "dead 3", *["published 0"] * 3)


async def test_a_relay_that_retires_finishes_what_it_has_in_hand(jobs: Jobs, outbox: Outbox) -> None:
    class SlowPublisher(Publisher):
        async def publish(self, message: Message, within: timedelta) -> None:
            del within
            self.arrived.set()
            await release.wait()
            self.published.append(message)

    publisher, release = SlowPublisher(), asyncio.Event()
    relay = Relay(outbox, publisher, claim_size=10)
    task = asyncio.create_task(relay.run())
    await jobs.create()
    await publisher.arrived.wait()
    relay.retire()
    release.set()
    async with asyncio.timeout(10):
        await task
    assert [row["status"] for row in await jobs.rows(outbox_events)] == ["published"]
    assert not relay.working.is_set()
