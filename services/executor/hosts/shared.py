"""The usual place: the handlers' event loop, which all executions share."""

from services.executor.handlers import HandlerLoop
from services.executor.hosts.code import ExecutionCode, JobTypeCode
from services.executor.hosts.port import Facts, Means, Output, Projected


class SharedHost:
    """Implements `services.executor.hosts.port.Host`."""

    def __init__(self, handlers: HandlerLoop, code: JobTypeCode) -> None:
        self._handlers = handlers
        self._code = ExecutionCode(code)
        self._name = code.job_type

    async def read_input(self, snapshot_json: str) -> None:
        """Validate the snapshot."""
        await self._handlers.run(lambda: self._code.read_input(snapshot_json), self._name)

    async def execute(self, facts: Facts, means: Means) -> Output:
        """Call the handler."""
        return await self._handlers.run(lambda: self._code.execute(facts, means), self._name)

    async def project(self, facts: Facts) -> Projected:
        """Call the projector."""
        return await self._handlers.run(lambda: self._code.project(facts), f"projector of {self._name}")

    async def close(self) -> None:
        """Do nothing: what a cancelled handler leaves behind cannot be ended, and may call no more models."""
