"""One client for JobService and JobAdminService: request ids, deadlines, safe repeats, typed errors."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message
from pydantic import JsonValue

from aijobs.client.operators import OperatorCalls
from aijobs.client.watching import Watch
from aijobs.errors import DeadlineExceeded, InvalidInput
from aijobs.rpc.job_states import TERMINAL_VALUES, to_proto
from aijobs.states import JobState
from aijobs.v1 import job_pb2, job_service_pb2

_MessageT = TypeVar("_MessageT", bound=Message)
LARGEST_PAGE = 100


class Client(OperatorCalls):
    """The jobs service as its callers see it. Use it as an async context manager, and one for the whole process.

    Every method raises the errors of `aijobs.errors`; those that the contract names are given in job_service.proto. The
    calls for operators are in `OperatorCalls`, what the constructor takes in `Connection`.
    """

    async def create(
        self,
        job_type: str,
        *,
        user_id: str,
        input: JsonValue = None,  # noqa: A002 - the contract's word
        input_json: str | None = None,
        target: tuple[str, str] | None = None,
        idempotency_key: str = "",
        strict_idempotency: bool = False,
        labels: Mapping[str, str] | None = None,
        priority: int | None = None,
        credential_mode: str | None = None,
        credential_id: str | None = None,
        prompt_version: str | None = None,
        output_schema_version: str | None = None,
        run_at: datetime | None = None,
        validate_only: bool = False,
        request_id: str | None = None,
        traceparent: str | None = None,
    ) -> job_service_pb2.CreateJobResponse:
        """Create a job, once, however often the request has to be repeated.

        Args:
            job_type: name of a definition.
            user_id: the end user that the job belongs to.
            input: what it works on, as a value.
            input_json: the same as JSON text, numbers kept as written; give one of the two.
            target: type and id of the caller's own thing that the job is about.
            idempotency_key: finds an earlier job of the same user and type instead of making another.
            strict_idempotency: refuse if that earlier request was a different one.
            labels: at most 16.
            priority: from 0 (first) to 100 (last); the definition's if unset.
            credential_mode: whose key pays; the definition's if unset.
            credential_id: the user's stored credential, for the modes that need one.
            prompt_version: of the job type's prompt; the definition's if unset.
            output_schema_version: the definition's if unset.
            run_at: when the job may start, an aware time; at once if unset or past.
            validate_only: check everything and write nothing; the answer then has no job.
            request_id: only to repeat a request of which the answer was lost; made here otherwise.
            traceparent: the caller's trace (W3C Trace Context); it goes along to the run and the completion event.

        Raises:
            InvalidInput: a field is not as it must be; its subclasses say more.
            IdempotencyKeyReused: with strict keys only.
            ValueError: `run_at` has no time zone.

        """
        if isinstance(run_at, datetime) and run_at.utcoffset() is None:
            # Protobuf would take it for UTC without a word.
            raise ValueError("run_at: has no time zone; give an aware datetime, for example datetime.now(UTC)")
        request = _built(
            job_service_pb2.CreateJobRequest,
            request_id=request_id or str(uuid4()),
            user_id=user_id,
            job_type=job_type,
            input_json=_json_text(input) if input_json is None else input_json,
            idempotency_key=idempotency_key,
            strict_idempotency=strict_idempotency,
            labels=dict(labels or {}),
            validate_only=validate_only,
            run_at=run_at,
        )
        if target is not None:
            request.target.CopyFrom(job_pb2.Target(type=target[0], id=target[1]))
        overrides = {
            "priority": priority,
            "credential_mode": credential_mode,
            "credential_id": credential_id,
            "prompt_version": prompt_version,
            "output_schema_version": output_schema_version,
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        if given:
            request.overrides.CopyFrom(_built(job_service_pb2.Overrides, **given))
        return await self._call(self._jobs.CreateJob, request, traceparent=traceparent)

    async def get(self, job_id: str, *, user_id: str = "", full: bool = False) -> job_pb2.Job:
        """Return a job; with `full` its output and the contents of its artifacts too.

        Raises:
            JobNotFound: no such job, or not one of this user.

        """
        view = job_pb2.JOB_VIEW_FULL if full else job_pb2.JOB_VIEW_BASIC
        request = job_service_pb2.GetJobRequest(job_id=job_id, user_id=user_id, view=view)
        return (await self._call(self._jobs.GetJob, request)).job

    async def list(
        self,
        *,
        user_id: str = "",
        job_type: str = "",
        states: Collection[JobState | str] = (),
        queue: str = "",
        page_size: int = LARGEST_PAGE,
    ) -> AsyncIterator[job_pb2.Job]:
        """Yield jobs, newest first, asking for the next page when it is needed."""
        request = job_service_pb2.ListJobsRequest(
            user_id=user_id,
            job_type=job_type,
            states=[to_proto(JobState(state)) for state in states],
            queue=queue,
            page_size=page_size,
        )
        while True:
            page = await self._call(self._jobs.ListJobs, request)
            for job in page.jobs:
                yield job
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def cancel(
        self, job_id: str, *, user_id: str = "", reason: str = "", request_id: str | None = None
    ) -> job_service_pb2.CancelJobResponse:
        """Cancel a job: a queued one at once, a running one as soon as it can stop.

        Raises:
            JobNotFound: no such job, or not one of this user.
            JobNotCancellable: it has ended, or its type cannot be cancelled.
            JobAlreadyCancelled: by an earlier request.

        """
        request = job_service_pb2.CancelJobRequest(
            request_id=request_id or str(uuid4()), job_id=job_id, user_id=user_id, reason=reason
        )
        return await self._call(self._jobs.CancelJob, request)

    def watch(
        self, job_id: str, *, user_id: str = "", after_sequence: int | None = None, include_progress: bool = False
    ) -> AsyncGenerator[job_service_pb2.WatchJobResponse, None]:
        """Yield the job as it is, then every change in order; ends after the terminal one.

        Put it into `contextlib.aclosing` when you may leave the loop early.

        Args:
            job_id: the job.
            user_id: on whose behalf.
            after_sequence: also the changes after this number that already happened; 0 for all of them.
            include_progress: also when only the progress has moved.

        Raises:
            JobNotFound: no such job, or not one of this user.
            Unreachable: cut off for longer than the client's patience; shorter cuts are not seen.

        """
        request = job_service_pb2.WatchJobRequest(
            job_id=job_id, user_id=user_id, after_sequence=after_sequence, include_progress=include_progress
        )
        return Watch(self._jobs.WatchJob, request, address=self._address, patience=self._patience).updates()

    async def create_and_wait(
        self,
        job_type: str,
        *,
        user_id: str,
        wait: timedelta | None = None,
        **create: Any,
    ) -> job_pb2.Job:
        """Create a job, wait until it has ended and return it in full. Look at its state: it may have failed.

        Args:
            job_type: name of a definition.
            user_id: the end user that the job belongs to.
            wait: how long to wait; without limit if unset. The job goes on when the wait is over.
            **create: everything else that `create` takes, except `validate_only`.

        Raises:
            DeadlineExceeded: the job had not ended after `wait`. The message names the job.

        """
        job = (await self.create(job_type, user_id=user_id, **create)).job
        limit = asyncio.timeout(None if wait is None else wait.total_seconds())
        try:
            async with limit:
                if job.state not in TERMINAL_VALUES:
                    await self._until_ended(job.job_id, user_id)
                return await self.get(job.job_id, user_id=user_id, full=True)
        except TimeoutError as error:
            if wait is None or not limit.expired():
                raise
            raise DeadlineExceeded(f"job {job.job_id} had not ended after {wait.total_seconds():g} s") from error

    async def _until_ended(self, job_id: str, user_id: str) -> None:
        async with aclosing(self.watch(job_id, user_id=user_id)) as updates:
            async for _ in updates:
                pass


def _json_text(value: JsonValue) -> str:
    try:
        return json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput.field("input", f"is no JSON: {error}") from error


def _built(kind: type[_MessageT], **fields: Any) -> _MessageT:
    """Build a message; what protobuf says of a wrong type names neither the field nor the type."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidInput.field(name, f"cannot be {value!r:.80}") from error
    return message
