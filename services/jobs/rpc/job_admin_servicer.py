"""JobAdminService: what operators call."""

import json
from datetime import timedelta
from typing import Any

import grpc

from aijobs.definition import JobDefinition
from aijobs.registry import Registry
from aijobs.v1 import job_admin_service_pb2, job_admin_service_pb2_grpc


class JobAdminServicer(job_admin_service_pb2_grpc.JobAdminServiceServicer):
    """Translates between the wire and the use cases."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def ListJobTypes(
        self, request: job_admin_service_pb2.ListJobTypesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> job_admin_service_pb2.ListJobTypesResponse:
        """Return every definition (RG-4)."""
        del request, context
        return job_admin_service_pb2.ListJobTypesResponse(
            job_types=[_job_type(definition) for definition in self._registry.values()]
        )


def _job_type(definition: JobDefinition) -> job_admin_service_pb2.JobType:
    return job_admin_service_pb2.JobType(
        job_type=definition.job_type,
        label=definition.metadata.label,
        description=definition.metadata.description,
        domain=definition.metadata.domain,
        version=definition.metadata.version,
        queue=definition.routing.queue,
        default_priority=definition.routing.default_priority,
        timeout_ms=definition.execution.timeout // timedelta(milliseconds=1),
        max_retries=definition.max_retries,
        cancellable=definition.execution.cancellable,
        input_schema_version=definition.input.version,
        input_schema_json=json.dumps(definition.input.model.model_json_schema()),
        output_schema_version=definition.output.version,
        output_schema_json=json.dumps(definition.output.model.model_json_schema()),
    )
