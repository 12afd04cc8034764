"""A queue of the in-memory broker."""

import asyncio
from collections import deque

from aijobs.broker.port import Message


class WaitingQueue:
    """The waiting messages of one queue, and who waits for one."""

    def __init__(self) -> None:
        self.waiting: deque[Message] = deque()
        self.arrived = asyncio.Condition()

    async def put(self, message: Message, *, first: bool = False) -> None:
        """Add a message at the end, or at the head."""
        async with self.arrived:
            if first:
                self.waiting.appendleft(message)
            else:
                self.waiting.append(message)
            # All of them: one that is being cancelled would swallow a single notification.
            self.arrived.notify_all()

    async def get(self) -> Message:
        """Take the message at the head, waiting for one."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.waiting)
            return self.waiting.popleft()
