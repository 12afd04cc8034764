"""`aijobs` as a process."""

import asyncio
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    status: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIJOBS_")}
    return kept | {"COLUMNS": "200"} | more


async def start(*arguments: str, stdin: int = asyncio.subprocess.DEVNULL, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli"),
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )


async def aijobs(*arguments: str, stdin: bytes | None = None, **env: str) -> Ended:
    pipe = asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE
    process = await start(*arguments, stdin=pipe, **env)
    async with asyncio.timeout(30):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    ended = Ended(status=process.returncode, out=out.decode(), err=err.decode())
    assert "Traceback" not in ended.out + ended.err
    return ended
