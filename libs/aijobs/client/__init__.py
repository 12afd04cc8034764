"""The client that backends use.

async with Client("127.0.0.1:50051") as client:
    job = await client.create_and_wait("structured_generation", user_id="u-1", input={...})
"""

from aijobs.client.client import Client

__all__ = ["Client"]
