"""What every command shares: the address, the token, and a client that lives as long as the command."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import typer

from aijobs.client import Client
from services.cli.exits import CommandError, Exit
from services.cli.output import Output

DEFAULT_ADDRESS = "127.0.0.1:50051"

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of the program."""

    address: str
    output: Output

    @asynccontextmanager
    async def client(self, patience: timedelta = timedelta(0)) -> AsyncIterator[Client]:
        """Connect. Without patience a person learns at once that nobody answers.

        Raises:
            CommandError: address or token cannot be ones.

        """
        try:
            client = Client(self.address, os.environ.get("AIJOBS_TOKEN") or None, patience=patience)
        except ValueError as error:
            advice = "Set AIJOBS_ADDRESS or --address to host:port, and AIJOBS_TOKEN to a token."
            raise CommandError(str(error), advice=advice, status=Exit.BAD_INPUT) from error
        async with client:
            yield client

    def run(self, command: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Run the asynchronous part of a command."""

        async def main() -> ResultT:
            return await command()

        return asyncio.run(main())


def session_of(context: typer.Context) -> Session:
    """Return the session that the program's callback made."""
    session = context.obj
    if not isinstance(session, Session):
        raise TypeError("the command runs outside of the program")
    return session
