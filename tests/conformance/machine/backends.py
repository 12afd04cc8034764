"""Backends and operators: they create, cancel and retry jobs, repeat requests, and use request ids twice."""

from dataclasses import replace

from aijobs.errors import (
    AijobsError,
    IdempotencyKeyReused,
    JobAlreadyCancelled,
    JobNotCancellable,
    JobNotRetryable,
    RequestIdReused,
    RetryInProgress,
    TooManyJobs,
)
from aijobs.states import JobState
from services.jobs.admission import NewJob
from services.jobs.cancellation import Cancel, CancelAnswer, CancelOutcome
from services.jobs.creation import Created
from services.jobs.retrying import RETRYABLE, Retry
from services.jobs.store.jobs import JobRow
from tests.conformance.conftest import BACKEND
from tests.conformance.machine.stage import Again, Stage, answered
from tests.conformance.machine.world import LIVE_LIMIT, ended, waits


class Backends:
    """Knows what was asked and answered, so that it can say what the same request has to be answered."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        #: By request id, user and method: the request and its answer.
        self._answers: dict[tuple[str, str, str], tuple[object, object]] = {}
        self._asked: dict[str, NewJob] = {}
        #: Every request that was answered, to be sent again exactly as it was.
        self.sent: list[Again] = []

    async def create(self, request: NewJob) -> None:
        """Create a job: once for a request id, once for an idempotency key, and never above the limit."""
        step = await self._stage.step(
            f"create({request.user_id}, {request.request_id}, key={request.idempotency_key}, {request.input})",
            lambda: self._stage.services.creation.create(BACKEND.caller, [request]),
        )
        (answer,) = step.answer
        content = replace(request, request_id="", strict_idempotency=False)
        memory = (request.request_id, request.user_id, "create")
        earlier = [
            job
            for job in step.before.jobs.values()
            if request.idempotency_key is not None
            and (job["user_id"], job["job_type"]) == (request.user_id, request.job_type)
            and job["idempotency_key"] == request.idempotency_key
        ]
        if memory in self._answers:
            self._expect_memory(memory, content, _created(answer), answer)
            assert step.quiet
            return
        if earlier:
            differs = self._asked[earlier[0]["job_id"]] != content
            if differs and request.strict_idempotency:
                assert step.refused(IdempotencyKeyReused)
                return
            assert _created(answer) == (earlier[0]["job_id"], True, differs), "a repeat is never refused"
            assert not step.news
            assert step.before.events == step.after.events
        elif step.before.live(request.user_id) >= LIVE_LIMIT:
            assert step.refused(TooManyJobs)
            return
        else:
            assert isinstance(answer, Created), "refused, although the user has fewer"
            assert not answer.deduplicated
            assert step.news == {answer.job.job_id: ["created"]}
            self._asked[answer.job.job_id] = content
        self._answers[memory] = content, _created(answer)
        self.sent.append(lambda: self.create(request))

    async def cancel(self, job_id: str, request_id: str) -> None:
        """Cancel a job; what was acknowledged stays true."""
        request = Cancel(request_id=request_id, job_id=job_id, reason="")
        step = await self._stage.step(
            f"cancel({job_id[-6:]}, {request_id})",
            lambda: answered(self._stage.services.cancellation.cancel(BACKEND, request)),
        )
        job = step.before.jobs[job_id]
        memory = (request_id, job["user_id"], "cancel")
        outcome = step.answer.outcome if isinstance(step.answer, CancelAnswer) else None
        if memory in self._answers:
            self._expect_memory(memory, request, outcome, step.answer)
            assert step.quiet
            return
        if job["lifecycle_status"] == JobState.CANCELLED:
            assert step.refused(JobAlreadyCancelled)
            return
        if ended(job) or not job["cancellable"]:
            assert step.refused(JobNotCancellable)
            return
        assert outcome == (CancelOutcome.CANCELLED if waits(job) else CancelOutcome.REQUESTED)
        first = outcome == CancelOutcome.CANCELLED or job["cancel_requested_at"] is None
        kind = "cancelled" if outcome == CancelOutcome.CANCELLED else "cancel_requested"
        assert step.news == ({job_id: [kind]} if first else {})
        self._answers[memory] = request, outcome
        self.sent.append(lambda: self.cancel(job_id, request_id))

    async def retry(self, job_id: str, request_id: str) -> None:
        """Retry a job that failed or was cancelled; its user's limit does not count."""
        request = Retry(request_id=request_id, job_id=job_id, reason="")
        step = await self._stage.step(
            f"retry({job_id[-6:]}, {request_id})",
            lambda: answered(self._stage.services.retrying.retry("operator", request)),
        )
        old = step.before.jobs[job_id]
        memory = (request_id, old["user_id"], "retry")
        new = step.answer.job_id if isinstance(step.answer, JobRow) else None
        if memory in self._answers:
            self._expect_memory(memory, request, new, step.answer)
            assert step.quiet
            return
        if old["lifecycle_status"] not in RETRYABLE:
            assert step.refused(JobNotRetryable)
            return
        if any(job["retry_of"] == job_id and not ended(job) for job in step.before.jobs.values()):
            assert step.refused(RetryInProgress)
            return
        assert new is not None
        assert step.news == {new: ["retried"]}
        assert step.after.jobs[new]["retry_of"] == job_id
        self._answers[memory] = request, new
        self.sent.append(lambda: self.retry(job_id, request_id))

    def _expect_memory(self, memory: tuple[str, str, str], request: object, said: object, answer: object) -> None:
        """A request id stands for one request, and that one is answered as it was the first time."""
        first, answer_then = self._answers[memory]
        if first == request:
            assert said == answer_then, "a repeat is answered as the first one was"
        else:
            assert isinstance(answer, RequestIdReused)


def _created(answer: Created | AijobsError) -> tuple[str, bool, bool] | None:
    if isinstance(answer, AijobsError):
        return None
    return answer.job.job_id, answer.deduplicated, answer.request_differs
