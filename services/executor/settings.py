"""Settings of the executor, from `AIJOBS_*` environment variables."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field

from aijobs.broker.settings import BrokeredSettings
from aijobs.definition import QUEUE_DEFAULTS, Queue
from aijobs.settings import Seconds
from services.executor.gateway.settings import ModelSettings

Slots = Annotated[int, Field(ge=0, le=500)]


class ExecutorSettings(BrokeredSettings, ModelSettings):
    """What the executor can be told."""

    #: Where it serves health.
    listen: str = "127.0.0.1:50053"
    #: Runs at a time per queue; 0: leave the queue to other executors.
    slots_interactive: Slots = QUEUE_DEFAULTS[Queue.INTERACTIVE].concurrency
    slots_background: Slots = QUEUE_DEFAULTS[Queue.BACKGROUND].concurrency
    #: How often leases are renewed. Cancels are heard through the session, and with a renewal if that is broken.
    heartbeat_interval: Annotated[Seconds, Field(ge=timedelta(milliseconds=50), le=timedelta(seconds=60))] = Field(
        default=timedelta(seconds=5), validation_alias="AIJOBS_HEARTBEAT_SECONDS"
    )

    @property
    def slots(self) -> dict[Queue, int]:
        """Runs at a time for each queue that this executor consumes."""
        slots = {Queue.INTERACTIVE: self.slots_interactive, Queue.BACKGROUND: self.slots_background}
        return {queue: number for queue, number in slots.items() if number}
