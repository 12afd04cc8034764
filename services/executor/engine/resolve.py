"""RESOLVE: find the handler, read the snapshot, and open the way to a model (EX-1)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from pydantic import BaseModel, ValidationError

from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.job_type import Executor, ModelGateway, Projector
from aijobs.logs import place_of
from services.executor.handlers import HandlerLoop
from services.executor.leases import Lease, LeasedJob


class OpenGateway(ModelGateway, Protocol):
    """A gateway that is closed when its execution is over: what is left of a handler can then spend nothing more."""

    def close(self) -> None:
        """Refuse every further call."""
        ...


UNKNOWN_TYPE_TIMEOUT = timedelta(seconds=1)
#: Makes the gateway of one execution; the numbers are those of its model calls.
MakeGateway = Callable[[Lease, Iterator[int]], OpenGateway]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A job type with its code loaded."""

    definition: JobDefinition
    execute: Executor
    project: Projector | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All that one execution works with."""

    leased: LeasedJob
    handler: Handler
    input: BaseModel
    models: OpenGateway


class Resolve:
    """The stage."""

    def __init__(self, types: Mapping[str, Handler], handlers: HandlerLoop, make_gateway: MakeGateway) -> None:
        self._types = types
        self._handlers = handlers
        self._make_gateway = make_gateway

    def timeout(self, job_type: str) -> timedelta:
        """Return the limit of one execution; of a type that we do not know, the shortest there is."""
        handler = self._types.get(job_type)
        return handler.definition.execution.timeout if handler else UNKNOWN_TYPE_TIMEOUT

    async def __call__(self, leased: LeasedJob, call_numbers: Iterator[int]) -> Resolved:
        """Find what an execution needs.

        Args:
            leased: the job.
            call_numbers: of the attempt's model calls; executions of one attempt share them.

        Raises:
            ExecutionFailed: `INTERNAL_UNKNOWN_JOB_TYPE`: the message named a type that we know, the job another one;
                `INTERNAL_SNAPSHOT_INVALID`: this version cannot read the snapshot.

        """
        handler = self._types.get(leased.job_type)
        if handler is None:
            raise ExecutionFailed("INTERNAL_UNKNOWN_JOB_TYPE", f"no handler for {leased.job_type}")
        # The model's validators are somebody's code: they run where handlers run.
        value = await self._handlers.run(lambda: _input(handler.definition, leased), leased.job_type)
        models = self._make_gateway(leased.lease, call_numbers)
        return Resolved(leased=leased, handler=handler, input=value, models=models)


async def _input(definition: JobDefinition, leased: LeasedJob) -> BaseModel:
    try:
        return definition.input.model.model_validate_json(leased.snapshot_json)
    except ValidationError as error:
        why = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
    except Exception as error:  # noqa: BLE001 - whatever a validator raises; its message may repeat the snapshot
        why = place_of(error)
    raise ExecutionFailed("INTERNAL_SNAPSHOT_INVALID", f"snapshot does not fit: {why}")
