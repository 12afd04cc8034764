"""What the executor does when the jobs service is away, or does not take what it is told."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from aijobs.broker.memory import MemoryBroker, MemoryConsumer, MemoryDelivery
from aijobs.broker.port import LARGEST_BODY, BrokerUnavailable, Message
from aijobs.definition import CredentialMode
from aijobs.errors import AijobsError, InternalError, PayloadTooLarge, PermissionDenied, ShuttingDown, Unreachable
from aijobs.job_type import ModelTier
from services.executor import ledger as ledger_module
from services.executor.consumer import QueueConsumer
from services.executor.engine.complete import Complete, Ended, RunAgain
from services.executor.engine.engine import Engine
from services.executor.engine.prepare import Prepare, SessionPort
from services.executor.gateway.ledger import CallOpened, CallSettled
from services.executor.gateway.provider import Usage
from services.executor.heartbeats import Heartbeats
from services.executor.leases import Beat, Lease, LeasedJob, RunStopped, StopReason
from services.executor.ledger import LedgerWriter
from services.executor.lifecycle_client import Accepted, LifecycleClient, Refused, Renewed
from services.executor.outcomes import Abandoned, Cancelled, Failed, Report, Succeeded

LEASE = Lease(job_id="job-1", attempt=1, lease_token="token")
SUCCESS = Succeeded(output_json="{}", output_hash="h", artifacts=[])
FAILURE = Failed(execution=2, code="PROVIDER_TIMEOUT", internal="")
DONE = Accepted(state="JOB_STATE_SUCCEEDED", backoff=None)
Answer = Accepted | Refused | LeasedJob | Renewed | AijobsError | None


class Client(LifecycleClient):
    """Answers as scripted and keeps what it is told."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.told: list[object] = []
        self.epochs: list[int] = []
        self.asked = asyncio.Event()

    def _answer(self) -> object:
        self.asked.set()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def submit(self, lease: Lease, outcome: Report) -> Accepted | Refused:
        self.told.append(outcome)
        answer = self._answer()
        assert isinstance(answer, Accepted | Refused)
        return answer

    async def lock(self, job_id: str, lease_token: str, session_epoch: int) -> LeasedJob | Refused:
        self.told.append(lease_token)
        self.epochs.append(session_epoch)
        answer = self._answer()
        assert isinstance(answer, LeasedJob | Refused)
        return answer

    async def extend(self, beats: Sequence[Beat], progress: Sequence[int | None]) -> list[Renewed | Refused]:
        self.told.append(list(progress))
        answer = self._answer()
        assert isinstance(answer, Renewed | Refused)
        return [answer]

    async def record(self, lease: Lease, call: CallOpened | CallSettled) -> None:
        self.told.append(call)
        self._answer()


class Session(SessionPort):
    """Open; a new one follows each that is lost."""

    def __init__(self) -> None:
        self.number = 1

    async def epoch(self) -> int:
        return self.number

    def lost(self, epoch: int) -> None:
        self.number = epoch + 1


def leased(job_id: str = "job-1", held_for: timedelta = timedelta(hours=1)) -> LeasedJob:
    return LeasedJob(
        lease=Lease(job_id=job_id, attempt=1, lease_token="token"),
        job_type="testing",
        user_id="user-1",
        root_job_id=job_id,
        takeovers=0,
        depth=0,
        snapshot_json="{}",
        run_until=math.inf,
        earlier_errors=[],
        abort_at=asyncio.get_running_loop().time() + held_for.total_seconds(),
    )


def renewed(*, cancel_requested: bool = False, held_for: timedelta = timedelta(hours=1)) -> Renewed:
    return Renewed(cancel_requested=cancel_requested, abort_after=held_for)


def refused(reason: str) -> Refused:
    return Refused(reason=reason, message="for a log")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.backoff.random.uniform", lambda *_: 0.01)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([DONE], [SUCCESS]),
        ([refused("LEASE_LOST")], [SUCCESS]),
        ([refused("ILLEGAL_TRANSITION")], [SUCCESS]),
        ([refused("CANCEL_REQUESTED"), DONE], [SUCCESS, Cancelled()]),
        (
            [refused("INVALID_INPUT"), DONE],
            [SUCCESS, Failed(execution=2, code="INTERNAL_RESULT_REFUSED", internal="refused: INVALID_INPUT")],
        ),
        (
            [InternalError("broken"), DONE],
            [SUCCESS, Failed(execution=2, code="INTERNAL_RESULT_REFUSED", internal="refused: INTERNAL")],
        ),
        (
            [PayloadTooLarge("message too large"), PermissionDenied("no")],
            [SUCCESS, Failed(execution=2, code="INTERNAL_RESULT_REFUSED", internal="refused: PAYLOAD_TOO_LARGE")],
        ),
    ],
)
async def test_a_result_that_is_not_taken_is_followed_by_what_remains(
    answers: list[Answer], told: list[object]
) -> None:
    client = Client(*answers)
    assert await Complete(client)(LEASE, 2, SUCCESS) == Ended()
    assert client.told == told
    assert client.answers == []


async def test_a_failure_that_is_not_taken_ends_the_run_with_one_that_is() -> None:
    client = Client(refused("INVALID_INPUT"), Accepted(state="JOB_STATE_RUNNING", backoff=timedelta(seconds=1)))
    assert await Complete(client)(LEASE, 2, FAILURE) == RunAgain(backoff=timedelta(seconds=1))
    assert client.told == [
        FAILURE,
        Failed(execution=2, code="INTERNAL_REPORT_REFUSED", internal="refused: INVALID_INPUT"),
    ]


async def test_an_abandoned_run_reports_nothing() -> None:
    client = Client()
    assert await Complete(client)(LEASE, 1, Abandoned()) == Ended()
    assert client.told == []


async def test_a_lock_is_repeated_with_the_same_token_while_the_service_is_away() -> None:
    client = Client(Unreachable("jobs"), Unreachable("jobs"), refused("LEASE_CONFLICT"))
    assert await Prepare(client, Session())("job-1", going_on=lambda: True) == refused("LEASE_CONFLICT")
    assert len(set(map(str, client.told))) == 1


async def test_a_process_that_ends_takes_no_more_jobs() -> None:
    """Not even one whose lock it has been trying for while the jobs service was away."""
    client = Client(Unreachable("jobs"), Unreachable("jobs"))
    with pytest.raises(ShuttingDown):
        await Prepare(client, Session())("job-1", going_on=lambda: bool(client.answers))
    assert len(client.told) == 2


async def test_a_lost_session_is_opened_again_and_the_lock_repeated_with_the_same_token() -> None:
    client = Client(refused("SESSION_LOST"), refused("JOB_NOT_READY"))
    assert await Prepare(client, Session())("job-1", going_on=lambda: True) == refused("JOB_NOT_READY")
    assert (len(set(map(str, client.told))), client.epochs) == (1, [1, 2])


@pytest.mark.parametrize("answer", [PermissionDenied("no"), refused("INTERNAL"), refused("NOT_ATTEMPTED")])
async def test_a_lock_that_says_nothing_about_the_job_is_no_reason_to_forget_it(answer: Answer) -> None:
    with pytest.raises(AijobsError):
        await Prepare(Client(answer), Session())("job-1", going_on=lambda: True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refused("LEASE_LOST"), StopReason.LEASE_LOST),
        (refused("JOB_NOT_FOUND"), StopReason.LEASE_LOST),
        (renewed(cancel_requested=True), StopReason.CANCEL_REQUESTED),
        (refused("INTERNAL"), None),
        (refused("NOT_ATTEMPTED"), None),
        (renewed(), None),
        (Unreachable("jobs"), None),
        (InternalError("broken"), None),
    ],
)
async def test_only_a_lost_lease_or_a_cancel_stops_a_run(answer: Answer, reason: StopReason | None) -> None:
    client = Client(answer, *[renewed()] * 1000)
    heartbeats = Heartbeats(client, timedelta(milliseconds=10))
    beating = asyncio.create_task(heartbeats.run())
    with heartbeats.beating(leased()) as beat:
        async with asyncio.timeout(5):
            while len(client.told) < 2:
                client.asked.clear()
                await client.asked.wait()
        assert beat.switch.reason == reason
    beating.cancel()


@pytest.mark.parametrize("answer", [Unreachable("jobs"), refused("INTERNAL")])
async def test_a_run_whose_lease_cannot_be_renewed_stops_by_itself(answer: Answer) -> None:
    """LC-6: before the jobs service gives it to somebody else, by a clock that nobody can set."""
    heartbeats = Heartbeats(Client(*[answer] * 1000), timedelta(milliseconds=5))
    beating = asyncio.create_task(heartbeats.run())
    lease = leased(held_for=timedelta(milliseconds=50))
    with heartbeats.beating(lease) as beat, pytest.raises(RunStopped) as stopped:
        await beat.switch.guard(asyncio.sleep(60))
    beating.cancel()
    assert stopped.value.reason == StopReason.LEASE_LOST


async def test_a_renewal_puts_the_time_off_at_which_a_run_stops() -> None:
    client = Client(renewed(held_for=timedelta(hours=1)), *[Unreachable("jobs")] * 1000)
    heartbeats = Heartbeats(client, timedelta(milliseconds=5))
    beating = asyncio.create_task(heartbeats.run())
    with heartbeats.beating(leased(held_for=timedelta(milliseconds=50))) as beat:
        await beat.switch.guard(asyncio.sleep(0.1))  # longer than the first lease
    beating.cancel()
    assert beat.switch.reason is None


async def test_a_report_is_given_up_when_the_lease_has_ended() -> None:
    class Away(LifecycleClient):
        def __init__(self) -> None: ...

        async def _submit(self, lease: Lease, outcome: Report) -> Accepted | Refused:
            raise Unreachable("jobs")

    heartbeats = Heartbeats(Client(), timedelta(hours=1))
    with heartbeats.beating(leased(held_for=timedelta(milliseconds=20))) as beat, pytest.raises(RunStopped):
        await beat.switch.while_held(Complete(Away())(LEASE, 1, SUCCESS))


async def test_a_cancel_does_not_interrupt_a_report() -> None:
    heartbeats = Heartbeats(Client(), timedelta(hours=1))
    with heartbeats.beating(leased()) as beat:
        beat.switch.stop(StopReason.CANCEL_REQUESTED)
        beat.switch.stop(StopReason.SHUTTING_DOWN)
        assert await beat.switch.while_held(Complete(Client(DONE))(LEASE, 1, SUCCESS)) == Ended()


async def test_a_cancel_that_comes_before_the_answer_to_the_lock_stops_the_run_when_it_starts() -> None:
    heartbeats = Heartbeats(Client(), timedelta(hours=1))
    heartbeats.cancel("job-1", 1)
    heartbeats.cancel("job-2", 1)
    with heartbeats.beating(leased("job-1")) as first, heartbeats.beating(leased("job-3")) as other:
        heartbeats.cancel("job-3", 2)  # another attempt
        assert (first.switch.reason, other.switch.reason) == (StopReason.CANCEL_REQUESTED, None)
        heartbeats.cancel("job-3", 1)
        assert other.switch.reason == StopReason.CANCEL_REQUESTED


async def test_runs_that_start_while_others_are_given_back_are_given_back_too() -> None:
    heartbeats = Heartbeats(Client(), timedelta(hours=1))
    with heartbeats.beating(leased("1")) as running:
        heartbeats.hand_back()
        with heartbeats.beating(leased("2")) as starting:
            assert (running.switch.reason, starting.switch.reason) == (StopReason.SHUTTING_DOWN,) * 2


async def test_leases_that_are_shorter_than_expected_are_renewed_in_time() -> None:
    """Two services with settings that do not fit: nobody's run may be lost by that."""
    client = Client(*[renewed(held_for=timedelta(milliseconds=400))] * 1000)
    heartbeats = Heartbeats(client, timedelta(hours=1))
    beating = asyncio.create_task(heartbeats.run())
    with heartbeats.beating(leased(held_for=timedelta(milliseconds=400))) as beat:
        await beat.switch.guard(asyncio.sleep(1))
    beating.cancel()
    assert beat.switch.reason is None


async def test_a_broken_session_renews_all_leases_at_once() -> None:
    client = Client(renewed())
    heartbeats = Heartbeats(client, timedelta(hours=1))
    beating = asyncio.create_task(heartbeats.run())
    with heartbeats.beating(leased()):
        heartbeats.renew_now()
        async with asyncio.timeout(5):
            await client.asked.wait()
    beating.cancel()


async def test_a_renewal_that_a_report_overtook_is_no_lost_lease() -> None:
    """The job has ended, so its lease is gone: nothing that an operator should read of."""
    client = Client(*[refused("LEASE_LOST")] * 100)
    heartbeats = Heartbeats(client, timedelta(milliseconds=5))
    beating = asyncio.create_task(heartbeats.run())
    with capture_logs() as logs, heartbeats.beating(leased()) as beat:
        beat.reporting = True
        async with asyncio.timeout(5):
            while len(client.told) < 2:
                client.asked.clear()
                await client.asked.wait()
    beating.cancel()
    assert (beat.switch.reason, logs) == (None, [])


async def test_a_run_that_reports_progress_all_the_time_starves_nobody() -> None:
    """The quiet run's lease must be renewed, and its cancel heard of, whatever others report."""

    class ChattyClient(LifecycleClient):
        def __init__(self) -> None:
            self.renewed = asyncio.Event()

        async def extend(self, beats: Sequence[Beat], progress: Sequence[int | None]) -> list[Renewed | Refused]:
            chatty.report_progress(1)  # again, before the answer is there
            if quiet in beats:
                self.renewed.set()
            return [renewed() for _ in beats]

    client = ChattyClient()
    heartbeats = Heartbeats(client, timedelta(milliseconds=50))
    with (
        heartbeats.beating(leased()) as chatty,
        heartbeats.beating(leased("2")) as quiet,
    ):
        beating = asyncio.create_task(heartbeats.run())
        for _ in range(3):
            client.renewed.clear()
            async with asyncio.timeout(5):
                await client.renewed.wait()
        beating.cancel()


OPENED = CallOpened(
    call_no=1,
    provider="p",
    model="m",
    tier=ModelTier.PRIMARY,
    prompt_key="",
    prompt_version="",
    credential_mode=CredentialMode.PLATFORM_KEY,
)
SETTLED = CallSettled(opened=OPENED, usage=Usage(), latency=timedelta(0))


async def test_a_settled_call_waits_for_the_jobs_service_but_the_handler_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EX-6: the money is spent, so the row is sent until it is stored; the answer that it paid for is not lost."""
    monkeypatch.setattr(ledger_module, "SETTLE_WITHIN", timedelta(0))
    client = Client(Unreachable("jobs"), Unreachable("jobs"), None)
    writer = LedgerWriter(client)
    await writer.settle(LEASE, SETTLED)
    await writer.drain(timedelta(seconds=5))
    assert client.told == [SETTLED] * 3


async def test_a_refused_row_is_not_repeated() -> None:
    client = Client(InternalError("no such job"))
    writer = LedgerWriter(client)
    await writer.settle(LEASE, SETTLED)
    assert client.told == [SETTLED]
    with pytest.raises(InternalError):
        await LedgerWriter(Client(InternalError("no such job"))).open(LEASE, OPENED)


class EndlessEngine(Engine):
    """Runs jobs until it is let go."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.finished: list[str] = []

    async def run(self, job_id: str, *, going_on: Callable[[], bool], held_until: float) -> None:
        self.started.set()
        await self.go_on.wait()
        self.finished.append(job_id)


STARTABLE = asyncio.Event()
STARTABLE.set()
JOB_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


async def consuming(broker: MemoryBroker, engine: Engine, body: str) -> tuple[QueueConsumer, asyncio.Task[None]]:
    consumer = QueueConsumer(
        broker, "ai-interactive", 1, engine, timedelta(seconds=5), may_start=STARTABLE, hand_back=lambda: None
    )
    task = asyncio.create_task(consumer.run())
    message = Message(queue="ai-interactive", topic="", message_id="m", correlation_id="", body=body.encode())
    await broker.publisher().publish(message, timedelta(seconds=1))
    return consumer, task


class DepartingBroker(MemoryBroker):
    """Hands out one message, then is away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = asyncio.Event()

    def consumer(self, queue: str, prefetch: int) -> MemoryConsumer:
        if self.away.is_set():
            raise BrokerUnavailable("away")
        return DepartingConsumer(self, queue, prefetch)


class DepartingConsumer(MemoryConsumer):
    async def deliveries(self) -> AsyncIterator[MemoryDelivery]:
        async for delivery in super().deliveries():
            yield delivery
            break
        assert isinstance(self.broker, DepartingBroker)
        self.broker.away.set()
        raise BrokerUnavailable("away")


async def test_stopping_waits_for_the_run_in_hand_also_when_the_broker_is_away() -> None:
    broker, engine = DepartingBroker(), EndlessEngine()
    consumer, task = await consuming(broker, engine, f'{{"jobId": "{JOB_ID}", "jobType": "known"}}')
    async with asyncio.timeout(10):
        await engine.started.wait()
        await broker.away.wait()
        task.cancel()
        await asyncio.sleep(0)
        engine.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.finished == [JOB_ID]
    assert not consumer.consuming.is_set()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"jobId": "x", "jobType": "known"}',
        f'{{"jobId": "{JOB_ID}", "jobType": ""}}',
        "x" * LARGEST_BODY,
    ],
)
async def test_a_poison_message_is_put_aside_and_the_next_one_runs(body: str) -> None:
    """Case B9."""
    broker, engine = MemoryBroker(), EndlessEngine()
    engine.go_on.set()
    poison = Message(queue="ai-interactive", topic="", message_id="p", correlation_id="", body=body.encode())
    broker.declare()
    await broker.publisher().publish(poison, timedelta(seconds=1))
    _, task = await consuming(broker, engine, f'{{"jobId": "{JOB_ID}", "jobType": "known", "more": 1}}')
    async with asyncio.timeout(5):
        await engine.started.wait()
    assert [message.message_id for message in broker.dead_letters] == ["p"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
