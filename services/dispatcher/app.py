"""The composition root of the dispatcher."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import grpc

from aijobs.broker.port import Broker, Publisher
from aijobs.rpc.channel import open_channel
from aijobs.rpc.readiness import Readiness
from aijobs.rpc.server import RpcServer
from aijobs.service import background
from services.dispatcher.outbox_client import OutboxClient
from services.dispatcher.relay import Relay
from services.dispatcher.replicas import Replicas
from services.dispatcher.settings import DispatcherSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherApp:
    """The parts of the dispatcher."""

    settings: DispatcherSettings
    server: RpcServer
    channel: grpc.aio.Channel
    publisher: Publisher
    relays: Replicas

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] | None = None) -> None:
        """Relay until `stop` is set; ready while broker and jobs service answer.

        Args:
            stop: ends the service.
            on_ready: is told the port of the health server once it serves.

        Raises:
            TopologyConflict: the broker holds a queue with other arguments.
            CannotListenError: the address is taken.
            BrokenLoopError: the relay ended by itself.

        """
        try:
            port = await self.server.start()
            if on_ready is not None:
                on_ready(port)
            async with background(stop, self.relays, Readiness(self.server, self.relays.working)):
                await stop.wait()
        finally:
            await self.publisher.close()
            await self.channel.close()
            await self.server.stop(self.settings.drain_time)


def build(settings: DispatcherSettings, broker: Broker) -> DispatcherApp:
    """Put the service together; nothing runs yet."""
    token = settings.own_token()
    channel = open_channel(settings.address, token)
    publisher = broker.publisher()
    # New at every start: a claim belongs to a process, not to a name.
    dispatcher_id = f"dispatcher-{uuid4().hex}"

    def make_relay(replica: str, changed: Callable[[], None]) -> Relay:
        outbox = OutboxClient(open_channel(replica, token), channel, dispatcher_id)
        return Relay(outbox, publisher, settings.claim_size, changed=changed)

    return DispatcherApp(
        settings=settings,
        server=RpcServer(settings.listen, settings.verifier()),
        channel=channel,
        publisher=publisher,
        relays=Replicas(settings.address, make_relay),
    )
