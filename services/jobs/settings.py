"""Settings of the jobs service, from `AIJOBS_*` environment variables."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated

from pydantic import Field, SecretStr, field_validator

from aijobs.definition import QUEUE_DEFAULTS, Queue, QueueDefaults
from aijobs.settings import Seconds, ServiceSettings
from services.jobs.quotas import Limits
from services.jobs.retention import Age, Ages, KeptJobs
from services.jobs.store.database import check_url

Attempts = Annotated[int, Field(ge=1, le=21)]
Backoff = Annotated[Seconds, Field(ge=timedelta(0), le=timedelta(minutes=10))]
Positive = Annotated[Seconds, Field(ge=timedelta(milliseconds=10), le=timedelta(hours=1))]


class JobsSettings(ServiceSettings):
    """What the jobs service can be told. Spans are in seconds in the environment."""

    #: `mysql+aiomysql://user:password@host:port/name` or `sqlite+aiosqlite:///path`.
    database_url: SecretStr
    #: Connections to the database at most.
    database_pool_size: Annotated[int, Field(ge=1, le=200)] = 10
    #: How long a lease lasts without a heartbeat (LC-4).
    lease_time: Positive = Field(default=timedelta(seconds=60), validation_alias="AIJOBS_LEASE_SECONDS")
    #: How long after its end a lease may still be renewed, before the reaper ends it (LC-7).
    lease_grace: Positive = Field(default=timedelta(seconds=30), validation_alias="AIJOBS_LEASE_GRACE_SECONDS")
    #: How often ended leases are looked for (LC-7).
    reap_interval: Positive = Field(default=timedelta(seconds=30), validation_alias="AIJOBS_REAP_SECONDS")
    #: How often a job whose executor died is run again by another one, before it fails (ruling 5).
    most_takeovers: Annotated[int, Field(ge=0, le=100)] = 3
    #: How long an executor whose session broke may take to come back (LC-8).
    session_grace: Annotated[Seconds, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=10))] = Field(
        default=timedelta(seconds=1), validation_alias="AIJOBS_SESSION_GRACE_SECONDS"
    )
    #: How often lost messages are looked for (LC-13).
    sweep_interval: Positive = Field(default=timedelta(seconds=30), validation_alias="AIJOBS_SWEEP_SECONDS")
    #: How long an executor must have been idle while a job waits, for the job's message to count as lost (LC-13).
    sweep_patience: Annotated[Seconds, Field(ge=timedelta(milliseconds=500), le=timedelta(hours=1))] = Field(
        default=timedelta(seconds=10), validation_alias="AIJOBS_SWEEP_PATIENCE_SECONDS"
    )
    #: Jobs of one user that have not ended, at most (CR-5).
    user_live_jobs: Annotated[int, Field(ge=0)] = 100
    #: Jobs that one user may create per UTC day; unset: any number (CR-5).
    user_daily_jobs: Annotated[int, Field(ge=0)] | None = None
    #: Jobs that one user may create per UTC month; unset: any number (CR-5).
    user_monthly_jobs: Annotated[int, Field(ge=0)] | None = None
    #: The same limits for single job types, as JSON: `{"synthetic": {"live": 5, "daily": 100, "monthly": 1000}}`.
    job_type_limits: dict[str, Limits] = Field(default_factory=dict)
    #: How long a dispatcher may hold a claimed event (OB-3).
    claim_time: Positive = Field(default=timedelta(seconds=60), validation_alias="AIJOBS_CLAIM_SECONDS")
    #: How often expired claims are looked for (OB-3).
    claim_release_interval: Positive = Field(
        default=timedelta(seconds=30), validation_alias="AIJOBS_CLAIM_RELEASE_SECONDS"
    )
    #: How long published events are kept (OB-10).
    keep_published_events: Age = Field(
        default=timedelta(days=1), validation_alias="AIJOBS_KEEP_PUBLISHED_EVENTS_SECONDS"
    )
    #: How long events are kept that could not be published, or no longer had to be (OB-10).
    keep_dead_events: Age = Field(default=timedelta(days=7), validation_alias="AIJOBS_KEEP_DEAD_EVENTS_SECONDS")
    #: How long jobs are kept after their end, with history, artifacts and output (OB-10).
    keep_jobs: Age = Field(default=timedelta(days=30), validation_alias="AIJOBS_KEEP_JOBS_SECONDS")
    #: How long ended jobs of single types are kept, by state, as JSON:
    #: `{"synthetic": {"succeeded": 3600, "failed": 86400}}`.
    keep_jobs_by_type: dict[str, KeptJobs] = Field(default_factory=dict)
    #: How long a job's input is kept after its end, for manual retries; never longer than the job (AP-7).
    keep_snapshots: Age = Field(default=timedelta(days=30), validation_alias="AIJOBS_KEEP_SNAPSHOTS_SECONDS")
    #: How often old rows are looked for (OB-10).
    retention_interval: Positive = Field(default=timedelta(minutes=5), validation_alias="AIJOBS_RETENTION_SECONDS")

    #: Executions of a job that its type leaves to the queue: failed ones are tried again so often, less one (QU-1).
    interactive_attempts: Attempts = QUEUE_DEFAULTS[Queue.INTERACTIVE].attempts
    background_attempts: Attempts = QUEUE_DEFAULTS[Queue.BACKGROUND].attempts
    #: The first wait between them, where the type leaves that to the queue; it doubles each time (QU-1).
    interactive_backoff: Backoff = Field(
        default=QUEUE_DEFAULTS[Queue.INTERACTIVE].backoff, validation_alias="AIJOBS_INTERACTIVE_BACKOFF_SECONDS"
    )
    background_backoff: Backoff = Field(
        default=QUEUE_DEFAULTS[Queue.BACKGROUND].backoff, validation_alias="AIJOBS_BACKGROUND_BACKOFF_SECONDS"
    )
    #: How long a dispatcher may give no sign of life before its claims end (OB-3).
    dispatcher_grace: Annotated[Seconds, Field(ge=timedelta(milliseconds=500), le=timedelta(minutes=10))] = Field(
        default=timedelta(seconds=3), validation_alias="AIJOBS_DISPATCHER_GRACE_SECONDS"
    )
    #: How far apart a user's jobs stand in the order of a queue: about the time in which the queue runs one (QU-3).
    rank_quantum: Annotated[Seconds, Field(ge=timedelta(milliseconds=1), le=timedelta(hours=1))] = Field(
        default=timedelta(milliseconds=100), validation_alias="AIJOBS_RANK_QUANTUM_SECONDS"
    )
    #: Messages of one queue that wait in the broker, at most: what is there cannot be overtaken any more (QU-3).
    queue_depth: Annotated[int, Field(ge=1, le=100_000)] = 50

    @field_validator("database_url")
    @classmethod
    def _database_url_is_one(cls, url: SecretStr) -> SecretStr:
        check_url(url.get_secret_value())
        return url

    def queue_defaults(self) -> Mapping[Queue, QueueDefaults]:
        """Return what queues give to definitions that say nothing themselves."""
        return {
            Queue.INTERACTIVE: QUEUE_DEFAULTS[Queue.INTERACTIVE].model_copy(
                update={"attempts": self.interactive_attempts, "backoff": self.interactive_backoff}
            ),
            Queue.BACKGROUND: QUEUE_DEFAULTS[Queue.BACKGROUND].model_copy(
                update={"attempts": self.background_attempts, "backoff": self.background_backoff}
            ),
        }

    def ages(self) -> Ages:
        """Return how long what is kept."""
        return Ages(
            published_events=self.keep_published_events,
            dead_events=self.keep_dead_events,
            jobs=self.keep_jobs,
            snapshots=self.keep_snapshots,
            jobs_by_type=self.keep_jobs_by_type,
        )
