"""The calls for operators (JobAdminService; those about outbox events: `outbox.py`). All need the admin role."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

from aijobs.client.outbox import OutboxCalls
from aijobs.v1 import job_admin_service_pb2, job_pb2

#: A check looks through every waiting job and all that ended lately.
CHECK_TIMEOUT = timedelta(minutes=10)


class OperatorCalls(OutboxCalls):
    """What operators ask for, as methods of the client."""

    async def list_job_types(self) -> Sequence[job_admin_service_pb2.JobType]:
        """Return every definition with its schemas, sorted by name."""
        answer = await self._call(self._admin.ListJobTypes, job_admin_service_pb2.ListJobTypesRequest())
        return tuple(answer.job_types)

    async def retry(self, job_id: str, *, reason: str = "", request_id: str | None = None) -> job_pb2.Job:
        """Make a new job with the input of one that failed or was cancelled, and return the new one.

        Args:
            job_id: the job to repeat; it does not change.
            reason: words for the new job's history.
            request_id: only to repeat a request of which the answer was lost; made here otherwise.

        Raises:
            JobNotFound: no such job.
            JobNotRetryable: it has not ended, or it succeeded.
            RetryInProgress: an earlier retry of it has not ended.
            SnapshotExpired: its input is no longer stored.

        """
        request = job_admin_service_pb2.RetryJobRequest(
            request_id=request_id or str(uuid4()), job_id=job_id, reason=reason
        )
        return (await self._call(self._admin.RetryJob, request)).job

    async def list_executors(self) -> Sequence[job_admin_service_pb2.Executor]:
        """Return the executors that were seen within the last day, the latest one first."""
        answer = await self._call(self._admin.ListExecutors, job_admin_service_pb2.ListExecutorsRequest())
        return tuple(answer.executors)

    async def drain_executor(self, executor_id: str) -> job_admin_service_pb2.Executor:
        """Tell an executor to take no more jobs and return it. What it runs goes on to its end.

        Raises:
            ExecutorNotFound: none with this id was seen lately.

        """
        request = job_admin_service_pb2.DrainExecutorRequest(executor_id=executor_id)
        return (await self._call(self._admin.DrainExecutor, request)).executor

    async def list_queues(self) -> Sequence[job_admin_service_pb2.QueueInfo]:
        """Return every queue, sorted by name."""
        answer = await self._call(self._admin.ListQueues, job_admin_service_pb2.ListQueuesRequest())
        return tuple(answer.queues)

    async def pause_queue(self, queue: str, *, reason: str = "") -> job_admin_service_pb2.QueueInfo:
        """Stop the start of a queue's jobs and return the queue; one that was paused keeps who did it and why.

        Raises:
            InvalidInput: no such queue, or a reason that is too long.

        """
        request = job_admin_service_pb2.PauseQueueRequest(queue=queue, reason=reason)
        return (await self._call(self._admin.PauseQueue, request)).queue

    async def resume_queue(self, queue: str) -> job_admin_service_pb2.QueueInfo:
        """End the pause of a queue, if there is one, and return the queue.

        Raises:
            InvalidInput: no such queue.

        """
        request = job_admin_service_pb2.ResumeQueueRequest(queue=queue)
        return (await self._call(self._admin.ResumeQueue, request)).queue

    async def platform_availability(self) -> job_admin_service_pb2.PlatformAvailability:
        """Return whether jobs can be created."""
        request = job_admin_service_pb2.GetPlatformAvailabilityRequest()
        return (await self._call(self._admin.GetPlatformAvailability, request)).availability

    async def set_platform_availability(
        self, available: bool, *, reason: str = ""
    ) -> job_admin_service_pb2.PlatformAvailability:
        """Switch the creation of jobs on or off and return what holds now. Jobs that exist go on.

        Args:
            available: whether jobs can be created.
            reason: words for callers who are refused; public.

        Raises:
            InvalidInput: the reason is too long.

        """
        request = job_admin_service_pb2.SetPlatformAvailabilityRequest(available=available, reason=reason)
        return (await self._call(self._admin.SetPlatformAvailability, request)).availability

    async def check_consistency(
        self, *, repair: bool = False, limit: timedelta = CHECK_TIMEOUT
    ) -> job_admin_service_pb2.CheckConsistencyResponse:
        """Look for jobs, events and queues that are not as they must be, and return what was found.

        Args:
            repair: also repair what can be.
            limit: how long it may take; it looks through every waiting job and all that ended lately.

        """
        request = job_admin_service_pb2.CheckConsistencyRequest(repair=repair)
        return await self._call(self._admin.CheckConsistency, request, limit=limit)
