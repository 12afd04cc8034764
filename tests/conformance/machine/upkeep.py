"""What keeps jobs going: dispatchers, the reaper, the sweep, operators, and the end where nothing goes wrong."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import uuid4

from aijobs.errors import ClaimLost
from services.jobs.events import EventType
from services.jobs.leasing import LockRequest
from services.jobs.outbox import Published, PublishFailed, Released, SettleRequest
from services.jobs.store.executors import QueueLoad
from services.jobs.store.queues import REPORT_INTERVAL
from tests.conformance.conftest import success
from tests.conformance.machine.holders import Holders, lapses
from tests.conformance.machine.stage import LEASE_GRACE, PATIENCE, TICK, Again, Meanwhile, Stage
from tests.conformance.machine.world import Row, World, due, ended, leased

QUEUE = "ai-interactive"
IDLE = [QueueLoad(queue=QUEUE, slots=2, free_slots=1, idle=timedelta(minutes=1))]
Result = Published | PublishFailed | Released


class Upkeep:
    """The parts of the engine that nobody calls for a job."""

    def __init__(self, stage: Stage, holders: Holders) -> None:
        self._stage = stage
        self._holders = holders
        #: Every claim: its token and the events that it was given.
        self.claims: list[tuple[str, Sequence[str]]] = []
        self.sent: list[Again] = []

    async def claim(self, token: str, limit: int) -> Sequence[str]:
        """Claim events: those that the claim holds already, or others that are due and that no pause holds back."""
        step = await self._stage.step(f"claim({token})", lambda: self._stage.services.claim(token, limit))
        held = [row for row in step.before.events.values() if _holds(row, token)]
        open_ = [
            row
            for row in step.before.events.values()
            if row["status"] == "pending"
            and row["queue"] not in step.before.paused
            # Settled under this token: whoever claims with it once more is late.
            and row["claim_token"] != token
        ]
        given = [event.event_id for event in step.answer]
        assert sorted(given) == sorted(row["event_id"] for row in step.after.events.values() if _holds(row, token))
        if held:
            assert sorted(given) == sorted(row["event_id"] for row in held)
        else:
            assert set(given) <= {row["event_id"] for row in open_}
            assert len(given) == min(limit, len(open_))
            assert _first_of_each_lane(open_, given)
        assert _untouched(step.before, step.after, given)
        if given:
            self.claims.append((token, given))

        async def again() -> None:
            await self.claim(token, limit)

        self.sent.append(again)
        return given

    async def settle(self, token: str, results: Sequence[tuple[str, Result]]) -> None:
        """Say what became of claimed events; of those that the claim no longer holds nothing is stored."""
        batch = [SettleRequest(event_id=event_id, result=result) for event_id, result in results]
        step = await self._stage.step(
            f"settle({token}, {[type(result).__name__ for _, result in results]})",
            lambda: self._stage.services.outbox.settle(token, batch),
        )
        before = {row["event_id"]: row for row in step.before.events.values()}
        after = {row["event_id"]: row for row in step.after.events.values()}
        settled = []
        for (event_id, result), answer in zip(results, step.answer, strict=True):
            row = before[event_id]
            assert answer is None if row["claim_token"] == token else isinstance(answer, ClaimLost)
            if _holds(row, token):
                settled.append(event_id)
                attempts = row["attempt_count"] + isinstance(result, PublishFailed)
                waits = "dead" if attempts == 3 else "scheduled"
                expected = "published" if isinstance(result, Published) else waits
                assert (after[event_id]["status"], after[event_id]["attempt_count"]) == (expected, attempts)
        assert _untouched(step.before, step.after, settled)
        self.sent.append(lambda: self.settle(token, results))

    async def promote(self) -> None:
        """Make due events pending; those that lead nowhere any more are dropped."""
        step = await self._stage.step("promote", self._stage.services.promotion.promote)
        now = self._stage.clock.now
        due_ = {
            key: row
            for key, row in step.before.events.items()
            if row["status"] == "scheduled" and row["available_at"] <= now
        }
        assert step.answer == len(due_)
        assert _untouched(step.before, step.after, [row["event_id"] for row in due_.values()], ranked=True)
        for key, row in due_.items():
            job = step.before.jobs[row["aggregate_id"]]
            superseded = row["event_type"] == EventType.ENQUEUE and (
                job["job_id"] not in step.before.waiting or step.before.dispatch(job["job_id"]) != row
            )
            assert step.after.events[key]["status"] == ("discarded" if superseded else "pending")

    async def release_claims(self) -> None:
        """End the claims that nobody settled in time."""
        step = await self._stage.step("release claims", self._stage.services.claim_release.release_expired)
        over = [
            row["event_id"]
            for row in step.before.events.values()
            if row["status"] == "processing" and row["claim_until"] < self._stage.clock.now
        ]
        assert step.answer == len(over)
        assert _untouched(step.before, step.after, over)
        assert {row["status"] for row in step.after.events.values() if row["event_id"] in over} <= {"pending"}

    async def reap(self, meanwhile: Meanwhile | None) -> None:
        """End the leases that ended long ago, and no other: not one that was renewed meanwhile."""
        began = self._stage.world
        found_at = self._stage.clock.now
        step = await self._stage.step("reap", self._stage.services.lapsing.reap, meanwhile=meanwhile)
        over = {
            job_id: job
            for job_id, job in step.before.jobs.items()
            if _expired(job, self._stage.clock.now) and job_id in began.jobs and _expired(began.jobs[job_id], found_at)
        }
        assert step.news == lapses(over)
        assert step.answer == len(over)

    async def sweep(self, reporter: str | None, meanwhile: Meanwhile | None) -> None:
        """Dispatch the jobs again whose message is lost, as far as an executor's idleness can tell, and no others."""
        if reporter in self._holders.sessions:
            await self._report_depths()
            await self._report_idle(reporter)
        began, found_at = self._stage.world, self._stage.clock.now
        idle = [
            row
            for row in began.executors.values()
            if row["executor_id"] == reporter
            and row["reported_at"] == found_at
            and row["disconnected_at"] is None
            and QUEUE not in began.paused
        ]
        step = await self._stage.step("sweep", self._stage.services.reconciliation.sweep, meanwhile=meanwhile)
        lost = {
            job_id: ["dispatched_again"]
            for job_id in began.waiting
            if job_id in step.before.waiting
            and began.jobs[job_id]["dispatch_no"] == step.before.jobs[job_id]["dispatch_no"]
            and _lost(began, job_id, found_at)
        }
        assert step.news.items() <= lost.items(), "a job was dispatched again whose message may still come"
        assert not idle or step.news == lost
        assert step.answer == len(step.news)

    async def _report_depths(self) -> None:
        """Have a dispatcher see twice that the broker holds no message."""
        for _ in range(2):
            self._stage.clock.advance(REPORT_INTERVAL + TICK)
            step = await self._stage.step("depths", lambda: self._stage.services.claim(limit=0, ready={QUEUE: 0}))
            assert step.quiet

    async def _report_idle(self, executor_id: str) -> None:
        session = self._holders.sessions[executor_id][-1]
        step = await self._stage.step(
            f"idle({session.executor_id})", lambda: self._stage.services.sessions.report(session, IDLE)
        )
        assert step.quiet
        if session.epoch == step.before.executors[executor_id]["session_epoch"]:
            self._holders.heard(executor_id)

    async def pause(self, *, paused: bool) -> None:
        """Pause the queue, or end the pause."""
        operating = self._stage.services.operating
        step = await self._stage.step(
            f"paused={paused}",
            lambda: operating.pause("operator", QUEUE, "") if paused else operating.resume("operator", QUEUE),
        )
        assert step.quiet
        assert (QUEUE in step.after.paused) == paused

    async def finish(self) -> None:
        """Bring everything to its end: one round of all parts, none of which fails.

        Nothing is left in the broker and nobody is left who holds a lease. What no part can bring back, a job whose
        event is dead, an operator has to: here by having it locked all the same.
        """
        stage, holders = self._stage, self._holders
        if QUEUE in stage.world.paused:
            await self.pause(paused=False)
        stage.clock.advance(LATEST)
        if holders.present:
            await self.reap(None)
        await self.release_claims()
        messages = [job_id for job_id in stage.world.waiting if stage.world.dispatch(job_id)["status"] == "dead"]
        await holders.hello("last")
        await self.sweep("last", None)
        await self.promote()
        given = await self.claim(uuid4().hex, 1000)
        events = {row["event_id"]: row for row in stage.world.events.values()}
        messages += [events[id_]["aggregate_id"] for id_ in given if events[id_]["event_type"] == EventType.ENQUEUE]
        waiting = sorted(set(messages) & set(stage.world.waiting))
        if waiting:
            wishes = [LockRequest(job_id=job_id, lease_token=uuid4().hex) for job_id in waiting]
            await holders.lock(holders.sessions["last"][-1], wishes)
            await holders.submit_all(success())
        left = [dict(job) for job in stage.world.jobs.values() if not ended(job)]
        assert not left, f"never ended: {left}"


#: Later than anything that a job may wait for.
LATEST = timedelta(hours=3)


def _holds(event: Row, token: str) -> bool:
    return bool(event["status"] == "processing" and event["claim_token"] == token)


def _first_of_each_lane(waiting: Sequence[Row], given: Sequence[str]) -> bool:
    """Tell whether no event of a type was given while one of the same queue and type with a smaller rank was not."""
    for lane in {(row["queue"], row["event_type"]) for row in waiting}:
        ordered = sorted(
            (row for row in waiting if (row["queue"], row["event_type"]) == lane),
            key=lambda row: (row["rank_at"], row["id"]),
        )
        taken = [row["event_id"] in given for row in ordered]
        if taken != sorted(taken, reverse=True):
            return False
    return True


def _untouched(before: World, after: World, touched: Sequence[str], *, ranked: bool = False) -> bool:
    """Tell whether nothing but these events changed, and perhaps the ranks of jobs."""
    changed = {key for key, event in before.events.items() if after.events.get(key) != event}
    return (
        (ranked or before.jobs == after.jobs)
        and before.history == after.history
        and before.events.keys() == after.events.keys()
        and {before.events[key]["event_id"] for key in changed} <= set(touched)
    )


def _expired(job: Row, now: datetime) -> bool:
    return leased(job) and bool(job["lock_until"] < now - LEASE_GRACE)


def _lost(world: World, job_id: str, now: datetime) -> bool:
    """Tell whether a waiting job's message would have arrived by now, had it not been lost."""
    job, event, since = world.jobs[job_id], world.dispatch(job_id), now - PATIENCE
    return (
        due(job, since)
        and (job["lapsed_at"] or job["created_at"]) <= since
        and event["status"] == "published"
        and event["settled_at"] <= since
    )
