"""The calls for operators that are about outbox events (JobAdminService). All of them need the admin role."""

from collections.abc import AsyncIterator, Collection, Sequence

from aijobs.client.connection import Connection
from aijobs.v1 import job_admin_service_pb2

_LARGEST_PAGE = 100


class OutboxCalls(Connection):
    """What operators ask for about outbox events, as methods of the client."""

    async def list_outbox_events(
        self,
        *,
        statuses: Collection["job_admin_service_pb2.OutboxEventStatus.ValueType"] = (),
        event_type: str = "",
        job_id: str = "",
        queue: str = "",
        page_size: int = _LARGEST_PAGE,
    ) -> AsyncIterator[job_admin_service_pb2.OutboxEventInfo]:
        """Yield outbox events, newest first, asking for the next page when it is needed.

        Args:
            statuses: only events in one of these; none: in any.
            event_type: only events of this type.
            job_id: only events about this job.
            queue: only events of this queue.
            page_size: how many are asked for at a time.

        """
        request = job_admin_service_pb2.ListOutboxEventsRequest(
            statuses=statuses, event_type=event_type, job_id=job_id, queue=queue, page_size=page_size
        )
        while True:
            page = await self._call(self._admin.ListOutboxEvents, request)
            for event in page.events:
                yield event
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def count_outbox_events(self) -> job_admin_service_pb2.CountOutboxEventsResponse:
        """Count the outbox events by status, and those that no dispatcher can send by type."""
        return await self._call(self._admin.CountOutboxEvents, job_admin_service_pb2.CountOutboxEventsRequest())

    async def requeue_outbox_events(
        self, event_ids: Collection[str], *, dry_run: bool = False
    ) -> Sequence[job_admin_service_pb2.OutboxEventResult]:
        """Have dead events published after all, and return what became of each, in order.

        Args:
            event_ids: at most 100.
            dry_run: change nothing, only return what would become of them.

        """
        request = job_admin_service_pb2.RequeueOutboxEventsRequest(event_ids=event_ids, dry_run=dry_run)
        return tuple((await self._call(self._admin.RequeueOutboxEvents, request)).results)

    async def requeue_dead_events(
        self, *, event_type: str = "", queue: str = "", job_id: str = "", dry_run: bool = False
    ) -> job_admin_service_pb2.RequeueOutboxEventsResponse:
        """Have the oldest 1,000 dead events that fit the filters published after all; without filters, of all.

        Args:
            event_type: only events of this type.
            queue: only events of this queue.
            job_id: only events about this job.
            dry_run: change nothing, only return what would become of them.

        """
        request = job_admin_service_pb2.RequeueOutboxEventsRequest(
            filter=job_admin_service_pb2.DeadEvents(event_type=event_type, queue=queue, job_id=job_id), dry_run=dry_run
        )
        return await self._call(self._admin.RequeueOutboxEvents, request)

    async def discard_outbox_events(
        self, event_ids: Collection[str]
    ) -> Sequence[job_admin_service_pb2.OutboxEventResult]:
        """Give up events that are not published yet, at most 100, and return what became of each, in order."""
        request = job_admin_service_pb2.DiscardOutboxEventsRequest(event_ids=event_ids)
        return tuple((await self._call(self._admin.DiscardOutboxEvents, request)).results)
