"""`aijobs check`: whether all is well, and what is not."""

from typing import Annotated

import typer

from aijobs.v1 import job_admin_service_pb2
from services.cli.exits import Exit
from services.cli.session import session_of

_PREFIX = "FINDING_KIND_"


def check(
    context: typer.Context,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be.")] = False,
) -> None:
    """Look for jobs, events and queues that are not as they must be. Safe while everything runs. Needs the admin role.

    The exit status is 1 if something is left that is not as it must be.
    """
    session = session_of(context)

    async def command() -> job_admin_service_pb2.CheckConsistencyResponse:
        async with session.client() as client:
            return await client.check_consistency(repair=repair)

    answer = session.run(command)
    found = sum(count.found for count in answer.counts)
    left = found - sum(count.repaired for count in answer.counts)
    if session.output.machine:
        session.output.document(answer)
    else:
        for finding in answer.findings:
            mark = "repaired" if finding.repaired else _word(finding.kind)
            session.output.text(f"{mark}: {finding.problem}; {finding.advice}")
        if len(answer.findings) < found:
            session.output.text(f"and {found - len(answer.findings):,} more")
        for count in answer.counts:
            session.output.note(f"{_word(count.kind)}: {count.found:,} found, {count.repaired:,} repaired")
        if not found:
            session.output.text("all is well")
    if left:
        raise typer.Exit(Exit.NOT_AS_WISHED)


def _word(kind: "job_admin_service_pb2.FindingKind.ValueType") -> str:
    known = kind in job_admin_service_pb2.FindingKind.values()
    name = job_admin_service_pb2.FindingKind.Name(kind) if known else f"kind {int(kind)}"
    return name.removeprefix(_PREFIX).lower().replace("_", " ")
