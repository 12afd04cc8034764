"""`aijobs check` as a process against a real server."""

import json

from aijobs.errors import PermissionDenied
from aijobs.v1 import job_admin_service_pb2 as admin_pb2
from tests.integration.cli.program import Ended, aijobs
from tests.integration.rpc.serving import ScriptedAdmin, serving

LOST = admin_pb2.Finding(
    kind=admin_pb2.FINDING_KIND_MESSAGE_LOST, job_id="j-1", problem="job j-1 waits", advice="check with repair"
)
REPAIRED = admin_pb2.Finding(
    kind=admin_pb2.FINDING_KIND_EVENT_DEAD,
    job_id="j-2",
    problem="job j-2 waits\x1b[2J",
    advice="it was requeued",
    repaired=True,
)
STRANGE = admin_pb2.Finding(kind=99, problem="something new", advice="ask")  # type: ignore[arg-type]  # a newer server's


def answer(*findings: admin_pb2.Finding, found: int, repaired: int) -> admin_pb2.CheckConsistencyResponse:
    count = admin_pb2.FindingCount(kind=admin_pb2.FINDING_KIND_EVENT_DEAD, found=found, repaired=repaired)
    return admin_pb2.CheckConsistencyResponse(findings=findings, counts=[count] if found else [])


async def asking(response: admin_pb2.CheckConsistencyResponse, *arguments: str) -> tuple[Ended, ScriptedAdmin]:
    admin = ScriptedAdmin(CheckConsistency=response)
    async with serving(admin=admin) as address:
        return await aijobs("check", *arguments, AIJOBS_ADDRESS=address), admin


async def test_an_engine_that_is_well_exits_with_0() -> None:
    ended, admin = await asking(answer(found=0, repaired=0))
    assert ended == Ended(status=0, out="all is well\n", err="")
    assert admin.requests == [admin_pb2.CheckConsistencyRequest()]


async def test_what_is_left_is_told_and_exits_with_1() -> None:
    ended, _ = await asking(answer(LOST, REPAIRED, STRANGE, found=1500, repaired=1))
    assert ended == Ended(
        status=1,
        out=(
            "message lost: job j-1 waits; check with repair\n"
            "repaired: job j-2 waits\\x1b[2J; it was requeued\n"
            "kind 99: something new; ask\n"
            "and 1,497 more\n"
        ),
        err="event dead: 1,500 found, 1 repaired\n",
    )


async def test_when_all_is_repaired_nothing_is_left() -> None:
    ended, admin = await asking(answer(REPAIRED, found=1, repaired=1), "--repair")
    assert (ended.status, ended.out) == (0, "repaired: job j-2 waits\\x1b[2J; it was requeued\n")
    assert admin.requests == [admin_pb2.CheckConsistencyRequest(repair=True)]


async def test_for_programs_it_is_one_document_with_the_same_status() -> None:
    ended, _ = await asking(answer(LOST, found=1, repaired=0), "--json")
    document = json.loads(ended.out)
    assert ended.status == 1
    assert document["findings"][0]["kind"] == "FINDING_KIND_MESSAGE_LOST"
    assert document["counts"][0]["found"] == 1


async def test_a_refused_check_is_no_finding() -> None:
    async with serving(admin=ScriptedAdmin(PermissionDenied("needs the role admin"))) as address:
        ended = await aijobs("check", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.out) == (4, "")
