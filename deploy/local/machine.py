"""What this machine can do for us: an engine for containers, programs, packages."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.local.mariadb import MariaDbBinaries
from deploy.local.rabbitmq import RabbitMqBinaries

_POLICY = Path("/usr/sbin/policy-rc.d")
_PROBE_SECONDS = 10
_INSTALL_SECONDS = 600


class LocalMachine:
    """The machine that this process runs on."""

    def docker_answers(self) -> bool:
        """Tell whether there is a Docker engine, not just its client."""
        if shutil.which("docker") is None:
            return False
        try:
            # With a format, a client without an engine exits 0 and prints an empty version.
            probe = subprocess.run(
                ["docker", "version", "--format", "{{.Server.Version}}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return probe.returncode == 0 and bool(probe.stdout.strip())

    def mariadb(self) -> MariaDbBinaries | None:
        """Return the programs of MariaDB, if they are here."""
        return MariaDbBinaries.find()

    def rabbitmq(self) -> RabbitMqBinaries | None:
        """Return the programs of RabbitMQ, if they are here."""
        return RabbitMqBinaries.find()

    def can_install(self) -> bool:
        """Tell whether we may install Debian packages."""
        return os.geteuid() == 0 and shutil.which("apt-get") is not None

    def install(self, packages: Sequence[str]) -> None:
        """Install Debian packages without letting them start a service.

        Raises:
            RuntimeError: apt-get failed; the message has the end of what it said.

        """
        # Debian's own switch for this; see /usr/share/doc/init-system-helpers/README.policy-rc.d.gz.
        ours = not _POLICY.exists()
        if ours:
            _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
            _POLICY.chmod(0o755)
        try:
            install = ["apt-get", "install", "-qq", "-y", "--no-upgrade", "--no-install-recommends", *packages]
            if _apt(install) is not None:
                # Perhaps the lists of packages are missing or old.
                _apt(["apt-get", "update", "-qq"])
                if (said := _apt(install)) is not None:
                    raise RuntimeError(f"{' '.join(install)} failed:\n{said}")
        finally:
            if ours:
                _POLICY.unlink(missing_ok=True)


def _apt(command: Sequence[str]) -> str | None:
    """Run apt-get; None if it succeeded, else the end of its output."""
    finished = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_INSTALL_SECONDS,
        check=False,
    )
    return None if finished.returncode == 0 else finished.stdout.decode(errors="replace")[-2000:]
