"""A RabbitMQ that takes no more messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deploy.local.provision import BrokerServer


@asynccontextmanager
async def memory_alarm(server: BrokerServer) -> AsyncIterator[None]:
    """Let a broker be short of memory, as it sees it, for the block."""
    await server.control("set_vm_memory_high_watermark", "0.000001")
    try:
        yield
    finally:
        await server.control("set_vm_memory_high_watermark", "0.4")
