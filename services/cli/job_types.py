"""`aijobs types`: what there is to create, and what it takes."""

from collections.abc import Sequence
from typing import Annotated

import typer

from aijobs.errors import UnknownJobType
from aijobs.v1 import job_admin_service_pb2
from services.cli.output import Output
from services.cli.session import session_of


def types(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one with its schemas.")] = None,
) -> None:
    """List the job types, or show one with the JSON Schemas of its input and output. Needs the admin role."""
    session = session_of(context)

    async def command() -> Sequence[job_admin_service_pb2.JobType]:
        async with session.client() as client:
            return await client.list_job_types()

    found = session.run(command)
    output = session.output
    if name is not None:
        known = [kind.job_type for kind in found]
        found = [kind for kind in found if kind.job_type == name]
        if not found:
            raise UnknownJobType(name, known=known)
    if output.machine:
        for kind in found:
            output.document(kind)
    elif name is None:
        rows = [(kind.job_type, kind.queue, kind.version, kind.description) for kind in found]
        output.table(("TYPE", "QUEUE", "VERSION", "DOES"), rows)
    else:
        _show(found[0], session.output)


def _show(kind: job_admin_service_pb2.JobType, output: Output) -> None:
    output.fields(
        {
            "type": kind.job_type,
            "label": kind.label,
            "does": kind.description,
            "domain": kind.domain,
            "version": kind.version,
            "queue": kind.queue,
            "priority": str(kind.default_priority),
            "timeout": f"{kind.timeout_ms / 1000:g} s for one execution",
            "retries": f"at most {kind.max_retries}",
            "cancel": "yes" if kind.cancellable else "no",
        }
    )
    for title, version, schema in (
        ("input", kind.input_schema_version, kind.input_schema_json),
        ("output", kind.output_schema_version, kind.output_schema_json),
    ):
        output.text(f"\n{title} (version {version}):" if version else f"\n{title}:", style="bold")
        output.json_layout(schema)
