"""Runs one command and ends all of its process group when nobody holds its lifeline any more.

    python guard.py LIFELINE REPORT -- COMMAND...

REPORT is an inherited descriptor; the pid of the command is written to it. The guard has the exit status of the
command, 128 + n if it died of signal n. SIGTERM to the guard kills the command.

Why not PR_SET_PDEATHSIG: it is cleared for the command's own children (rabbitmq-server is a shell script around the
real process) and fires when the *thread* that started the command ends. Run as a plain file without site packages, so
that a guard costs 20 ms and a few megabytes.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading

# From <linux/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


def main(lifeline: str, report: int, command: list[str]) -> int:
    """Run `command` to its end or the lifeline's; returns the exit status."""
    # Orphans of the command become our children, so that we know when the last of them has ended.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Its own session: Ctrl-C in a terminal is for the owner, who stops things in order.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_group() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

    def watch() -> None:
        with contextlib.suppress(FileNotFoundError), open(lifeline, "rb") as file:  # noqa: PTH123 - pathlib costs start-up time
            fcntl.flock(file, fcntl.LOCK_EX)
        end_group()

    signal.signal(signal.SIGTERM, lambda *_: end_group())
    os.write(report, str(child.pid).encode())
    os.close(report)
    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    # What the command left behind in its group, such as the real process of a killed wrapper script.
    end_group()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-child.pid, 0)
    # Orphans outside the group that have ended: in a container, process 1 may be one that reaps nobody.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    separator = sys.argv.index("--")
    # Without the interpreter's clean-up: the watching thread sits in a blocking call.
    os._exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[separator + 1 :]))
