"""The composition root of the executor."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from pkgutil import resolve_name
from uuid import uuid4

import grpc

from aijobs.broker.port import Broker
from aijobs.clock import steady_clock
from aijobs.definition import JobDefinition
from aijobs.harness import Harness, RetryPolicies
from aijobs.registry import Registry
from aijobs.rpc.channel import open_channel
from aijobs.rpc.readiness import Readiness
from aijobs.rpc.server import RpcServer
from aijobs.service import background
from services.executor.consumer import QueueConsumer
from services.executor.engine.complete import Complete
from services.executor.engine.engine import Engine
from services.executor.engine.execute import Execute
from services.executor.engine.prepare import Prepare
from services.executor.engine.project import Project
from services.executor.engine.resolve import Begun, Handler, Hosts, Resolve
from services.executor.gateway.gateway import Gateway
from services.executor.gateway.provider import Provider
from services.executor.gateway.settings import build_provider
from services.executor.handlers import HandlerLoop, HandlerWatch
from services.executor.heartbeats import Heartbeats
from services.executor.hosts.code import JobTypeCode
from services.executor.hosts.process import ProcessHost
from services.executor.hosts.shared import shared_host
from services.executor.ledger import LedgerWriter, RemoteLedger
from services.executor.lifecycle_client import LifecycleClient
from services.executor.session import ExecutorSession, Introduction
from services.executor.settings import ExecutorSettings

#: How long the end of the process waits for usage rows that are not stored yet.
LEDGER_DRAIN = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorApp:
    """The parts of the executor."""

    settings: ExecutorSettings
    server: RpcServer
    channel: grpc.aio.Channel
    handlers: HandlerLoop
    provider: Provider
    ledger: LedgerWriter
    heartbeats: Heartbeats
    session: ExecutorSession
    consumers: Sequence[QueueConsumer]

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] | None = None) -> None:
        """Run jobs until `stop` is set, then let the runs in hand finish within the drain time.

        Args:
            stop: ends the service.
            on_ready: is told the port of the health server once it serves.

        Raises:
            TopologyConflict: the broker holds a queue with other arguments.
            CannotListenError: the address is taken.
            BrokenLoopError: a background loop ended by itself.

        """
        self.handlers.start()
        try:
            port = await self.server.start()
            if on_ready is not None:
                on_ready(port)
            conditions = (
                self.handlers.responsive,
                self.session.open,
                *(consumer.consuming for consumer in self.consumers),
            )
            readiness = Readiness(self.server, *conditions)
            watch = HandlerWatch(self.handlers)
            # Leases are renewed, and the jobs service knows that we are here, until the last run has drained.
            async with (
                background(stop, self.heartbeats, self.session),
                background(stop, watch, readiness, *self.consumers),
            ):
                await stop.wait()
        finally:
            await self.handlers.stop(self.provider.close)
            await self.ledger.drain(LEDGER_DRAIN)
            await self.channel.close()
            await self.server.stop(self.settings.drain_time)


def build(settings: ExecutorSettings, registry: Registry, broker: Broker) -> ExecutorApp:
    """Put the service together; nothing runs yet. Call it in the event loop that will run it."""
    channel = open_channel(settings.address, settings.own_token())
    # New at every start: leases belong to a process, not to a name (LC-8).
    executor_id = f"executor-{uuid4().hex}"
    client = LifecycleClient(channel, executor_id)
    provider = build_provider(settings)
    ledger = LedgerWriter(client)
    main_loop = asyncio.get_running_loop()

    def make_gateway(begun: Begun) -> Gateway:
        return Gateway(
            provider=provider,
            models=settings.models,
            ledger=RemoteLedger(ledger, begun.leased.lease, main_loop),
            harness=begun.handler.harness,
            run=begun.run,
            monotonic=time.monotonic,
            call_numbers=begun.call_numbers,
        )

    handlers = HandlerLoop()
    heartbeats = Heartbeats(client, settings.heartbeat_interval)
    session = ExecutorSession(
        client,
        Introduction(executor_id=executor_id, version=version("aijobs-server"), job_types=sorted(registry)),
        heartbeats,
    )
    clock = steady_clock()
    types = {definition.job_type: _load(definition, clock, handlers) for definition in registry.values()}
    engine = Engine(
        prepare=Prepare(client, session),
        resolve=Resolve(
            types,
            Hosts(shared=partial(shared_host, handlers), process=partial(ProcessHost, handlers)),
            make_gateway,
        ),
        execute=Execute(),
        project=Project(),
        complete=Complete(client),
        heartbeats=heartbeats,
    )
    consumers = [
        QueueConsumer(
            broker,
            queue,
            slots,
            engine,
            settings.drain_time,
            may_start=handlers.responsive,
            hand_back=heartbeats.hand_back,
        )
        for queue, slots in settings.slots.items()
    ]
    session.serve(consumers)
    return ExecutorApp(
        settings=settings,
        server=RpcServer(settings.listen, settings.verifier()),
        channel=channel,
        handlers=handlers,
        provider=provider,
        ledger=ledger,
        heartbeats=heartbeats,
        session=session,
        consumers=consumers,
    )


def _load(definition: JobDefinition, clock: Callable[[], datetime], handlers: HandlerLoop) -> Handler:
    return Handler(
        definition=definition,
        code=JobTypeCode(
            job_type=definition.job_type,
            input=definition.input.model,
            output=definition.output.model,
            execute=resolve_name(definition.executor),
            project=resolve_name(definition.projector) if definition.projector else None,
        ),
        harness=Harness(
            clock=clock,
            make_run_id=lambda: uuid4().hex,
            longest_run=definition.execution.timeout,
            limits=definition.budget.limits(),
            retry_policies=RetryPolicies.strict(),
            # Callbacks are somebody's code: never on the loop of the heartbeats.
            notify=handlers.post,
        ),
    )
