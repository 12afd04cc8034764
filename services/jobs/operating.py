"""What operators do to the engine while it runs: pause queues, drain executors, switch creation off (QU-2, CR-5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog

from aijobs.definition import Queue
from aijobs.errors import ExecutorNotFound, InvalidInput
from services.jobs.store import executors, platform, queues
from services.jobs.store.database import Database, Transaction
from services.jobs.store.executors import ExecutorRow
from services.jobs.store.platform import Availability
from services.jobs.store.queues import QueueRow
from services.jobs.wakeups import Wakeups

#: How long an executor is listed after it was last seen.
LISTED_FOR = timedelta(days=1)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatus:
    """An executor and how many leases it holds."""

    executor: ExecutorRow
    running: int


class Operating:
    """Serves operators."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups

    async def queues(self) -> Sequence[QueueRow]:
        """Read every queue, by name.

        Raises:
            Unavailable: the database cannot be reached.

        """
        present = await self._database.read(queues.every)
        return [_queue(present, name) for name in sorted(Queue)]

    async def pause(self, caller: str, queue: str, reason: str) -> QueueRow:
        """Stop starting jobs of a queue; one that is paused already stays as it is.

        Raises:
            InvalidInput: no such queue.
            Unavailable: the database cannot be reached.

        """
        _require_queue(queue)

        async def work(tx: Transaction) -> QueueRow:
            await queues.create(tx, [queue])
            await queues.pause(tx, queue, by=caller, reason=reason)
            return _queue(await queues.every(tx), queue)

        paused = await self._database.write(work)
        log.warning("queue paused", queue=queue, caller=caller)
        return paused

    async def resume(self, caller: str, queue: str) -> QueueRow:
        """Start jobs of a queue again.

        Raises:
            InvalidInput: no such queue.
            Unavailable: the database cannot be reached.

        """
        _require_queue(queue)

        async def work(tx: Transaction) -> QueueRow:
            await queues.resume(tx, queue)
            tx.after_commit(self._wakeups.events.give)
            return _queue(await queues.every(tx), queue)

        resumed = await self._database.write(work)
        log.info("queue resumed", queue=queue, caller=caller)
        return resumed

    async def executors(self) -> Sequence[ExecutorStatus]:
        """Read the executors that were seen within the last day, the latest one first.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> Sequence[ExecutorStatus]:
            return await _with_counts(tx, await executors.latest(tx, within=LISTED_FOR))

        return await self._database.read(work)

    async def drain(self, caller: str, executor_id: str) -> ExecutorStatus:
        """Have an executor take no more jobs.

        Raises:
            ExecutorNotFound: no such executor.
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> ExecutorStatus:
            await executors.request_drain(tx, executor_id)
            executor = await executors.get(tx, executor_id)
            if executor is None:
                raise ExecutorNotFound(executor_id)
            tx.after_commit(self._wakeups.commands.give)
            (status,) = await _with_counts(tx, [executor])
            return status

        status = await self._database.write(work)
        log.warning("executor drained", executor_id=executor_id, caller=caller)
        return status

    async def availability(self) -> Availability:
        """Tell whether jobs can be created.

        Raises:
            Unavailable: the database cannot be reached.

        """
        return await self._database.read(platform.read)

    async def set_availability(self, caller: str, *, available: bool, reason: str) -> Availability:
        """Switch the creation of jobs on or off.

        Raises:
            Unavailable: the database cannot be reached.

        """

        async def work(tx: Transaction) -> Availability:
            await platform.write(tx, available=available, reason=reason, by=caller)
            return await platform.read(tx)

        switch = await self._database.write(work)
        log.warning("creation of jobs switched", available=available, caller=caller)
        return switch


async def _with_counts(tx: Transaction, rows: Sequence[ExecutorRow]) -> Sequence[ExecutorStatus]:
    counts = await executors.running_counts(tx, [row.executor_id for row in rows])
    return [ExecutorStatus(executor=row, running=counts.get(row.executor_id, 0)) for row in rows]


def _queue(present: Mapping[str, QueueRow], name: str) -> QueueRow:
    return present.get(name) or QueueRow(queue=name)


def _require_queue(queue: str) -> None:
    if queue not in list(Queue):
        raise InvalidInput.field("queue", f"no queue {queue[:80]!r}; there are: {', '.join(Queue)}")
