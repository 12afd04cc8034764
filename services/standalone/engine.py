"""The embedded engine: the three services in one process, on an SQLite file and an in-memory broker.

The services are the same as in production and talk over real gRPC on loopback; only what they stand on is smaller.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from aijobs.broker.memory import MemoryBroker
from aijobs.registry import Registry
from aijobs.service import CannotRun, background
from aijobs.settings import read
from services.dispatcher import app as dispatcher_app
from services.dispatcher.settings import DispatcherSettings
from services.executor import app as executor_app
from services.executor.settings import ExecutorSettings
from services.jobs import app as jobs_app
from services.jobs.migrate import upgrade_with
from services.jobs.settings import JobsSettings

#: A required setting that the in-memory broker has no use for.
NO_BROKER = SecretStr("amqp://in-memory")
ANY_PORT = "127.0.0.1:0"
RunApp = Callable[[asyncio.Event, Callable[[int], None]], Awaitable[None]]


class Service:
    """One of the services as a background loop of this process. Leaving the loop's block ends it in good order."""

    def __init__(self, name: str, run: RunApp) -> None:
        self.name = name
        self._run = run
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run the service until cancelled.

        Raises:
            CannotRun: from the service; before it serves, `port` raises it too.

        """
        try:
            await self._run(asyncio.Event(), self.port.set_result)
        except CannotRun as error:
            if not self.port.done():
                self.port.set_exception(error)
            raise


@asynccontextmanager
async def embedded(
    database: Path, stop: asyncio.Event, *, listen: str = ANY_PORT, registry: Registry | None = None
) -> AsyncIterator[str]:
    """Run the engine beside the block; yields the address of the jobs service.

    Settings come from the environment like those of the services, but for what embedding decides: no tokens, so
    loopback only.

    Args:
        database: SQLite file; created if missing, migrated if old.
        stop: set when a service ends by itself, so that the block comes to its end.
        listen: address of the jobs service.
        registry: the job types; the installed ones if unset.

    Raises:
        BadDefinitions: an installed job type is unusable.
        BadSettings: so is a setting in the environment.
        CannotListenError: the address is taken.
        BrokenLoopError: after the block, if a service ended by itself.

    """
    url = f"sqlite+aiosqlite:///{database}"
    await upgrade_with(url)
    job_types = Registry.installed(load_code=True) if registry is None else registry
    broker = MemoryBroker()
    jobs = jobs_app.build(read(JobsSettings, listen=listen, database_url=SecretStr(url), token_secret=None), job_types)
    async with AsyncExitStack() as stack:
        # Entered first, left last: executor and dispatcher report to the jobs service until they have ended.
        address = f"127.0.0.1:{await start(stack, stop, Service('jobs', jobs.run))}"
        # The broker and the executor are new: nothing that was published by an earlier process is on its way, and
        # whatever it ran is run by nobody.
        await jobs.lapsing.lapse_every_lease()
        await jobs.reconciliation.dispatch_all_again()
        common: dict[str, Any] = {
            "listen": ANY_PORT,
            "address": address,
            "broker_url": NO_BROKER,
            "token_secret": None,
            "token": None,
        }
        dispatcher = dispatcher_app.build(read(DispatcherSettings, **common), broker)
        await start(stack, stop, Service("dispatcher", dispatcher.run))
        executor = executor_app.build(read(ExecutorSettings, **common, AIJOBS_HEARTBEAT_SECONDS=1), job_types, broker)
        await start(stack, stop, Service("executor", executor.run))
        yield address


async def start(stack: AsyncExitStack, stop: asyncio.Event, service: Service) -> int:
    """Start a service and return its port; a service that breaks before it serves ends the engine.

    Raises:
        CannotRun: why it does not serve.
        EngineNotStarted: it ended in another way, or the engine was told to stop.

    """
    await stack.enter_async_context(background(stop, service))
    broken = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {service.port, broken}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        broken.cancel()
    if not service.port.done():
        raise EngineNotStarted(f"the {service.name} service did not start; the log says why")
    return service.port.result()


class EngineNotStarted(Exception):
    """A service ended before it served, or the process was told to stop meanwhile."""
