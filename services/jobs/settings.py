"""Settings of the jobs service, from `AIJOBS_*` environment variables."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field, SecretStr, field_validator

from aijobs.settings import Seconds, ServiceSettings
from services.jobs.store.database import check_url

Positive = Annotated[Seconds, Field(ge=timedelta(milliseconds=10), le=timedelta(hours=1))]


class JobsSettings(ServiceSettings):
    """What the jobs service can be told. Spans are in seconds in the environment."""

    #: `mysql+aiomysql://user:password@host:port/name` or `sqlite+aiosqlite:///path`.
    database_url: SecretStr
    #: Connections to the database at most.
    database_pool_size: Annotated[int, Field(ge=1, le=200)] = 10
    #: How long a lease lasts without a heartbeat (LC-4).
    lease_time: Positive = Field(default=timedelta(seconds=60), validation_alias="AIJOBS_LEASE_SECONDS")
    #: How long a dispatcher may hold a claimed event (OB-3).
    claim_time: Positive = Field(default=timedelta(seconds=60), validation_alias="AIJOBS_CLAIM_SECONDS")
    #: How often expired claims are looked for (OB-3).
    claim_release_interval: Positive = Field(
        default=timedelta(seconds=30), validation_alias="AIJOBS_CLAIM_RELEASE_SECONDS"
    )

    @field_validator("database_url")
    @classmethod
    def _database_url_is_one(cls, url: SecretStr) -> SecretStr:
        check_url(url.get_secret_value())
        return url
