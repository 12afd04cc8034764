"""The usual places: the handlers' event loop, which all coroutines share, and a thread for each plain function."""

from services.executor.handlers import HandlerLoop
from services.executor.hosts.code import BlockingModels, ExecutionCode, JobTypeCode, in_a_thread
from services.executor.hosts.port import Facts, Host, Means, Output, Projected


def shared_host(handlers: HandlerLoop, code: JobTypeCode) -> Host:
    """Choose between the two."""
    return LoopHost(handlers, code) if code.is_async else ThreadHost(handlers, code)


class LoopHost:
    """Implements `services.executor.hosts.port.Host` on the handlers' event loop."""

    def __init__(self, handlers: HandlerLoop, code: JobTypeCode) -> None:
        self._handlers = handlers
        self._code = ExecutionCode(code)
        self._name = code.job_type

    async def read_input(self, snapshot_json: str) -> None:
        """Validate the snapshot."""

        async def read() -> None:
            self._code.read_input(snapshot_json)

        await self._handlers.run(read, self._name)

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Call the handler."""
        return await self._handlers.run(lambda: self._code.execute(facts, means), self._name)

    async def project(self, facts: Facts) -> Projected:
        """Call the projector."""

        async def project() -> Projected:
            return self._code.project(facts)

        return await self._handlers.run(project, f"projector of {self._name}")

    async def close(self) -> None:
        """Do nothing: what a cancelled handler leaves behind cannot be ended, and may call no more models."""


class ThreadHost:
    """Implements `services.executor.hosts.port.Host` in threads of the execution's own.

    Only model calls need the handlers' loop: whoever blocks that delays nothing else here.
    """

    def __init__(self, handlers: HandlerLoop, code: JobTypeCode) -> None:
        self._handlers = handlers
        self._code = ExecutionCode(code)
        self._name = code.job_type

    async def read_input(self, snapshot_json: str) -> None:
        """Validate the snapshot."""
        await in_a_thread(lambda: self._code.read_input(snapshot_json), self._name)

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Call the handler."""
        models = BlockingModels(means.models, self._handlers.loop)
        return await in_a_thread(lambda: self._code.execute_here(facts, means, models), self._name)

    async def project(self, facts: Facts) -> Projected:
        """Call the projector."""
        return await in_a_thread(lambda: self._code.project(facts), self._name)

    async def close(self) -> None:
        """Do nothing: a thread cannot be ended, and may call no more models."""
