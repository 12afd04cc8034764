"""Settings of the dispatcher, from `AIJOBS_*` environment variables."""

from typing import Annotated

from pydantic import Field

from aijobs.broker.settings import BrokeredSettings


class DispatcherSettings(BrokeredSettings):
    """What the dispatcher can be told."""

    #: Where it serves health.
    listen: str = "127.0.0.1:50052"
    #: Events claimed at a time; also the window of unconfirmed messages.
    claim_size: Annotated[int, Field(ge=1, le=100)] = 50
