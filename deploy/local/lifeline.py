"""Who still needs a server: a file on which every user holds a shared lock.

A guard waits for the exclusive lock, which the kernel grants when the last user has let go - or has died, however it
died. That is the whole reference count: nothing to write, nothing that a `kill -9` could leave wrong.

The locks are not inherited by programs that are started (the descriptors are closed on exec).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Lifeline:
    """A user's hold on everything that was started with this lifeline.

    Args:
        path: the file to lock; made if missing. Its folder must exist.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def hold(self) -> "Lifeline":
        """Become a user, until `release` or the end of this process."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        return self

    def release(self) -> None:
        """Let go. If nobody else holds the lifeline, what hangs on it is ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def wait_until_abandoned(path: Path) -> None:
    """Block until nobody holds the lifeline. A lifeline that does not exist is abandoned."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the only lock on a file, made if missing; blocks while another process or thread has it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
