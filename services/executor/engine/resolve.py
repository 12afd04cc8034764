"""RESOLVE: turn the snapshot into the handler's input and find the way to a model (EX-1)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from aijobs.failures import ExecutionFailed
from aijobs.job_type import ModelGateway
from services.executor.engine.prepare import Prepared
from services.executor.leases import Lease

#: Makes the gateway of one execution; the numbers are those of its model calls.
OpenGateway = Callable[[Lease, Iterator[int]], ModelGateway]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All that one execution works with."""

    prepared: Prepared
    input: BaseModel
    models: ModelGateway


class Resolve:
    """The stage."""

    def __init__(self, open_gateway: OpenGateway) -> None:
        self._open_gateway = open_gateway

    def __call__(self, prepared: Prepared, call_numbers: Iterator[int]) -> Resolved:
        """Find what an execution needs.

        Args:
            prepared: the leased job.
            call_numbers: of the attempt's model calls; executions of one attempt share them.

        Raises:
            ExecutionFailed: `INTERNAL_SNAPSHOT_INVALID`: this version cannot read the snapshot.

        """
        definition = prepared.handler.definition
        try:
            value = definition.input.model.model_validate_json(prepared.leased.snapshot_json)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            raise ExecutionFailed("INTERNAL_SNAPSHOT_INVALID", f"snapshot does not fit: {fields}") from error
        return Resolved(prepared=prepared, input=value, models=self._open_gateway(prepared.leased.lease, call_numbers))
