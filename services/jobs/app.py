"""The composition root of the jobs service: builds every part and says who knows whom."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from aijobs.errors import Unavailable
from aijobs.registry import Registry
from aijobs.rpc.server import RpcServer
from aijobs.service import CannotRun, background
from aijobs.v1 import (
    job_admin_service_pb2_grpc,
    job_service_pb2_grpc,
    lifecycle_service_pb2_grpc,
    outbox_service_pb2_grpc,
)
from services.jobs.business_rows import BusinessRows, RowWriter
from services.jobs.cancellation import JobCancellation
from services.jobs.claim_release import ClaimRelease
from services.jobs.consistency import Consistency, look_back
from services.jobs.creation import JobCreation
from services.jobs.event_queries import EventQueries
from services.jobs.execution import JobExecution
from services.jobs.follow_ups import FollowUpJobs
from services.jobs.lapsing import JobLapsing
from services.jobs.leasing import JobLeasing
from services.jobs.migrate import require_current
from services.jobs.operating import Operating
from services.jobs.outbox import Outbox
from services.jobs.outbox_admin import OutboxAdmin
from services.jobs.projections import Projections
from services.jobs.promotion import Promotion
from services.jobs.queries import JobQueries
from services.jobs.quotas import Limits, Quotas
from services.jobs.ranking import QueueOrder
from services.jobs.reconciliation import Reconciliation
from services.jobs.retention import Retention
from services.jobs.retrying import JobRetrying
from services.jobs.rpc.job_admin_servicer import JobAdminServicer
from services.jobs.rpc.job_servicer import JobServicer
from services.jobs.rpc.lifecycle_servicer import LifecycleServicer
from services.jobs.rpc.outbox_servicer import OutboxServicer
from services.jobs.sessions import ExecutorSessions
from services.jobs.settings import JobsSettings
from services.jobs.store.database import Database
from services.jobs.usage import UsageLedger
from services.jobs.wakeups import Wakeups
from services.jobs.watching import JobWatching

#: How long a start waits between two looks at a database that is not there yet.
DATABASE_RETRY_SECONDS = 1.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsApp:
    """The parts of the jobs service."""

    settings: JobsSettings
    database: Database
    server: RpcServer
    claim_release: ClaimRelease
    promotion: Promotion
    watching: JobWatching
    sessions: ExecutorSessions
    lapsing: JobLapsing
    reconciliation: Reconciliation
    retention: Retention

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve until `stop` is set, then end calls in flight and close the database.

        Args:
            stop: ends the service.
            on_ready: is told the port once calls are taken.

        Raises:
            SchemaOutdated: the database needs `aijobs migrate` first.
            CannotListenError: the address is taken.
            BrokenLoopError: a background loop ended by itself.

        """
        try:
            port = await self.server.start()
            await self._database_is_ready(stop)
            if not stop.is_set():
                loops = (
                    *(self.claim_release, self.promotion, self.watching),
                    *(self.sessions, self.lapsing, self.reconciliation, self.retention),
                )
                async with background(stop, *loops):
                    await self.server.set_ready(True)
                    if on_ready is not None:
                        on_ready(port)
                    await stop.wait()
                    self.sessions.stop()
                    await self.server.stop(self.settings.drain_time)
        finally:
            await self.server.stop(self.settings.drain_time)
            await self.database.close()

    async def _database_is_ready(self, stop: asyncio.Event) -> None:
        """Wait for a database that is still starting; refuse one with another schema."""
        waiting = False
        while not stop.is_set():
            try:
                await require_current(self.database)
            except Unavailable:
                if not waiting:
                    log.warning("waiting for the database; check AIJOBS_DATABASE_URL if this goes on")
                waiting = True
                try:
                    async with asyncio.timeout(DATABASE_RETRY_SECONDS):
                        await stop.wait()
                except TimeoutError:
                    continue
            else:
                if waiting:
                    log.info("the database answers")
                return


def build(settings: JobsSettings, registry: Registry, *, writers: Mapping[str, RowWriter] | None = None) -> JobsApp:
    """Put the service together; nothing runs yet.

    Args:
        settings: what it was told.
        registry: the job types.
        writers: of business rows, by name; none if unset.

    """
    registry = registry.filled(settings.queue_defaults())
    wakeups = Wakeups()
    database = Database(settings.database_url.get_secret_value(), pool_size=settings.database_pool_size)
    queries = JobQueries(database)
    watching = JobWatching(queries, wakeups)
    outbox = Outbox(
        database,
        wakeups,
        claim_time=settings.claim_time,
        queue_depth=settings.queue_depth,
    )
    event_queries = EventQueries(database)
    claim_release = ClaimRelease(
        database, wakeups, event_queries, grace=settings.dispatcher_grace, interval=settings.claim_release_interval
    )
    lapsing = JobLapsing(
        database,
        wakeups,
        most_takeovers=settings.most_takeovers,
        grace=settings.lease_grace,
        interval=settings.reap_interval,
    )
    reconciliation = Reconciliation(
        database, wakeups, patience=settings.sweep_patience, interval=settings.sweep_interval
    )
    outbox_admin = OutboxAdmin(database, wakeups)
    sessions = ExecutorSessions(database, wakeups, lapsing, grace=settings.session_grace)
    unknown = sorted(set(settings.job_type_limits) - set(registry))
    if unknown:
        raise CannotRun(f"AIJOBS_JOB_TYPE_LIMITS: no such job types: {', '.join(unknown)}")
    every_type = Limits(
        live=settings.user_live_jobs, daily=settings.user_daily_jobs, monthly=settings.user_monthly_jobs
    )
    order = QueueOrder(settings.rank_quantum)
    creation = JobCreation(database, registry, wakeups, Quotas(every_type, settings.job_type_limits), order)
    server = RpcServer(settings.listen, settings.verifier())
    server.add(
        "aijobs.v1.JobService",
        job_service_pb2_grpc.add_JobServiceServicer_to_server,
        JobServicer(creation, queries, JobCancellation(database, wakeups), watching),
    )
    server.add(
        "aijobs.v1.JobAdminService",
        job_admin_service_pb2_grpc.add_JobAdminServiceServicer_to_server,
        JobAdminServicer(
            registry=registry,
            retrying=JobRetrying(database, registry, wakeups, order),
            operating=Operating(database, wakeups),
            event_queries=event_queries,
            outbox_admin=outbox_admin,
            consistency=Consistency(
                database,
                reconciliation,
                lapsing,
                outbox_admin,
                event_queries,
                look_back=look_back(settings.keep_published_events, settings.keep_dead_events),
            ),
        ),
    )
    server.add(
        "aijobs.v1.LifecycleService",
        lifecycle_service_pb2_grpc.add_LifecycleServiceServicer_to_server,
        LifecycleServicer(
            sessions,
            JobLeasing(database, wakeups, lease_time=settings.lease_time, grace=settings.lease_grace),
            JobExecution(
                database, wakeups, Projections(FollowUpJobs(registry, wakeups, order), BusinessRows(writers or {}))
            ),
            UsageLedger(database),
        ),
    )
    server.add(
        "aijobs.v1.OutboxService", outbox_service_pb2_grpc.add_OutboxServiceServicer_to_server, OutboxServicer(outbox)
    )
    return JobsApp(
        settings=settings,
        database=database,
        server=server,
        claim_release=claim_release,
        promotion=Promotion(database, wakeups, order),
        watching=watching,
        sessions=sessions,
        lapsing=lapsing,
        reconciliation=reconciliation,
        retention=Retention(database, ages=settings.ages(), interval=settings.retention_interval),
    )
