"""The client is installed into other teams' backends: it needs nothing but the small distribution's own packages."""

import subprocess
import sys

SERVER_ONLY = ("jwt", "structlog", "pydantic_settings", "aio_pika", "services")


def test_the_client_imports_nothing_that_only_servers_have() -> None:
    code = (
        f"import sys, aijobs.client, aijobs.completion; print([name for name in {SERVER_ONLY} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"
