"""Answers to COMMIT that get lost on their way: the one moment in which a client cannot know what it has done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.acceptance.gate import Link
from tests.acceptance.waiting import WITHIN

# The whole packet (length, number, COM_QUERY, text): AUTOCOMMIT, or a payload that says COMMIT, is another one.
COMMIT = b"\x07\x00\x00\x00\x03COMMIT"
ROLLBACK = b"\x09\x00\x00\x00\x03ROLLBACK"


class LostCommits:
    """Cuts connections to a MySQL or MariaDB server instead of delivering its answer to COMMIT, when told to.

    `link` goes into a `Gate` before the server.
    """

    def __init__(self) -> None:
        self._to_lose = 0
        self._about = b""
        self._held: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    def link(self) -> Link:
        """See one connection."""
        return _CommitLink(self)

    def lose(self, times: int, *, about: str) -> None:
        """Lose the answers to the next COMMITs of transactions with a text in them, whoever runs those."""
        self._to_lose = times
        self._about = about.encode()

    @asynccontextmanager
    async def lost(self) -> AsyncIterator[None]:
        """Wait for an answer that is to be lost. It is there, so the commit has happened; the cut comes afterwards."""
        async with asyncio.timeout(WITHIN.total_seconds()):
            held = await self._held.get()
        try:
            yield
        finally:
            held.set()

    def concerned(self, data: bytes) -> bool:
        """Tell whether a statement makes its transaction one whose COMMIT is not to be answered."""
        return self._to_lose > 0 and self._about in data

    def committed(self) -> bool:
        """Count a COMMIT of such a transaction; tell whether its answer is to be lost."""
        lost = self._to_lose > 0
        self._to_lose -= lost
        return lost

    async def hold(self) -> None:
        """Hold an answer until the test has seen what it wanted to see."""
        cut = asyncio.Event()
        self._held.put_nowait(cut)
        await cut.wait()


class _CommitLink(Link):
    def __init__(self, commits: LostCommits) -> None:
        self._commits = commits
        self._concerned = False
        self._lose_next = False

    async def sent(self, data: bytes) -> bool:
        # One packet is all that a client has under way, so a short one comes whole.
        self._lose_next = data == COMMIT and self._concerned and self._commits.committed()
        self._concerned = data not in (COMMIT, ROLLBACK) and (self._concerned or self._commits.concerned(data))
        return True

    async def answered(self, data: bytes) -> bool:
        if not self._lose_next:
            return True
        await self._commits.hold()
        return False
