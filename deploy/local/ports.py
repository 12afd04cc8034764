"""Free ports on loopback."""

import random
import socket

LOOPBACK = "127.0.0.1"
# Below the range from which systems take the ports of outgoing connections, which could snatch ours before we listen.
_FIRST, _LAST = 15_000, 30_000


def is_free(port: int) -> bool:
    """Tell whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """Return the preferred port if it is free, else a random free one.

    Raises:
        OSError: there seems to be none.

    """
    if preferred is not None and is_free(preferred):
        return preferred
    for _ in range(200):
        # Random, so that two processes that choose at the same time choose differently.
        port = random.randint(_FIRST, _LAST)  # noqa: S311 - no secret
        if is_free(port):
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST}")
