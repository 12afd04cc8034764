"""RESOLVE: find the handler, read the snapshot, and open the way to a model (EX-1)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.job_type import Executor, ModelGateway, Projector
from services.executor.leases import Lease, LeasedJob

#: Makes the gateway of one execution; the numbers are those of its model calls.
OpenGateway = Callable[[Lease, Iterator[int]], ModelGateway]


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
    models: ModelGateway


class Resolve:
    """The stage."""

    def __init__(self, handlers: Mapping[str, Handler], open_gateway: OpenGateway) -> None:
        self._handlers = handlers
        self._open_gateway = open_gateway

    def knows(self, job_type: str) -> bool:
        """Tell whether this executor can run jobs of a type."""
        return job_type in self._handlers

    def __call__(self, leased: LeasedJob, call_numbers: Iterator[int]) -> Resolved:
        """Find what an execution needs.

        Args:
            leased: the job.
            call_numbers: of the attempt's model calls; executions of one attempt share them.

        Raises:
            ExecutionFailed: `INTERNAL_UNKNOWN_JOB_TYPE`: the message named a type that we know, the job another one;
                `INTERNAL_SNAPSHOT_INVALID`: this version cannot read the snapshot.

        """
        handler = self._handlers.get(leased.job_type)
        if handler is None:
            raise ExecutionFailed("INTERNAL_UNKNOWN_JOB_TYPE", f"no handler for {leased.job_type}")
        try:
            value = handler.definition.input.model.model_validate_json(leased.snapshot_json)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            raise ExecutionFailed("INTERNAL_SNAPSHOT_INVALID", f"snapshot does not fit: {fields}") from error
        models = self._open_gateway(leased.lease, call_numbers)
        return Resolved(leased=leased, handler=handler, input=value, models=models)
