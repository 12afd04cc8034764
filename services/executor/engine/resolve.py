"""RESOLVE: find the job type, begin the run that bounds the execution, choose its host, read the snapshot."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from aijobs.definition import JobDefinition
from aijobs.failures import ExecutionFailed
from aijobs.harness import Harness, RunContext
from aijobs.job_type import ModelGateway
from services.executor.hosts.code import JobTypeCode
from services.executor.hosts.port import Facts, Host
from services.executor.leases import LeasedJob

#: Whoever was lost with two executors is not given a third one to take along (EX-11).
TAKEOVERS_BEFORE_ISOLATION = 2
UNKNOWN_TYPE_TIMEOUT = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A job type as the executor knows it. The harness carries its timeout and its budget."""

    definition: JobDefinition
    code: JobTypeCode
    harness: Harness


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Make places for the code of one execution."""

    shared: Callable[[JobTypeCode], Host]
    process: Callable[[JobDefinition], Host]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An execution and the run of the harness that bounds it."""

    handler: Handler
    leased: LeasedJob
    facts: Facts
    run: RunContext
    #: Numbers of the attempt's model calls; the executions of an attempt share them.
    call_numbers: Iterator[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All that one execution works with."""

    begun: Begun
    host: Host
    models: ModelGateway


#: Makes the way to models for one execution.
MakeGateway = Callable[[Begun], ModelGateway]


class Resolve:
    """The stage."""

    def __init__(self, types: Mapping[str, Handler], hosts: Hosts, make_gateway: MakeGateway) -> None:
        self._types = types
        self._hosts = hosts
        self._make_gateway = make_gateway

    def timeout(self, job_type: str) -> timedelta:
        """Return the limit of one execution; of a type that we do not know, the shortest there is."""
        handler = self._types.get(job_type)
        return handler.definition.execution.timeout if handler else UNKNOWN_TYPE_TIMEOUT

    def begin(self, leased: LeasedJob, facts: Facts, call_numbers: Iterator[int]) -> Begun:
        """Begin the run of one execution. It may take what its type allows, and what is left of the job's time.

        Raises:
            ExecutionFailed: `INTERNAL_UNKNOWN_JOB_TYPE`: the message named a type that we know, the job another one;
                `TIMEOUT`: nothing is left.

        """
        handler = self._types.get(leased.job_type)
        if handler is None:
            raise ExecutionFailed("INTERNAL_UNKNOWN_JOB_TYPE", f"no handler for {leased.job_type}")
        left = leased.run_until - asyncio.get_running_loop().time()
        if left <= 0:
            raise ExecutionFailed("TIMEOUT", "the time for all executions of the job together is over")
        run = handler.harness.start(
            leased.root_job_id,
            run_id=f"{facts.job_id}.{facts.attempt}.{facts.execution}",
            longest=timedelta(seconds=left) if math.isfinite(left) else None,
        )
        return Begun(handler=handler, leased=leased, facts=facts, run=run, call_numbers=call_numbers)

    def host(self, begun: Begun) -> Host:
        """Choose where the code of an execution runs. Whoever asks closes it."""
        handler = begun.handler
        isolated = handler.definition.execution.isolation == "process"
        if isolated or begun.leased.takeovers >= TAKEOVERS_BEFORE_ISOLATION:
            return self._hosts.process(handler.definition)
        return self._hosts.shared(handler.code)

    async def __call__(self, begun: Begun, host: Host) -> Resolved:
        """Read the snapshot and open the way to models.

        Raises:
            ExecutionFailed: `INTERNAL_SNAPSHOT_INVALID`: this version cannot read the snapshot.

        """
        await host.read_input(begun.leased.snapshot_json)
        return Resolved(begun=begun, host=host, models=self._make_gateway(begun))
