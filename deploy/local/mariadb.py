"""A private MariaDB: the local `mariadbd` on its own folder and loopback port."""

import asyncio
import getpass
import os
import shutil
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from deploy.local.database import DatabaseAddress, UnreachableError
from deploy.local.guarded import GuardedProcess, ProcessFailedError, tail
from deploy.local.lifeline import Lifeline, exclusively
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.secret_file import kept_secret, write_private
from deploy.local.server import START_WITHIN, LocalServer

USER = "aijobs"
STOP_WITHIN = timedelta(seconds=15)
# Debian keeps servers out of an ordinary user's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbBinaries:
    """The two programs that a private server needs."""

    server: Path
    install: Path

    @classmethod
    def find(cls) -> "MariaDbBinaries | None":
        """Return the programs of this machine, None if one is missing."""
        server = shutil.which("mariadbd", path=_PATH)
        install = shutil.which("mariadb-install-db", path=_PATH)
        return cls(server=Path(server), install=Path(install)) if server and install else None


class MariaDbServer(LocalServer):
    """A MariaDB of our own. It ends when its lifeline is abandoned.

    Args:
        folder: where data, log and password live; made if missing. Data of an earlier server there is used.
        lifeline: what the server hangs on.
        binaries: what to run.
        port: a free port on loopback; the same after a restart.
        flush_log_at_commit: `innodb_flush_log_at_trx_commit`: 1 survives a crash of the machine, 2 one of the server
            only, and is faster.
        template: a data folder to copy instead of making a new one (0.02 s instead of 0.5 s); made if missing, may be
            shared between processes.

    """

    product = "MariaDB"

    def __init__(
        self,
        folder: Path,
        *,
        lifeline: Lifeline,
        binaries: MariaDbBinaries,
        port: int | None = None,
        flush_log_at_commit: int = 1,
        template: Path | None = None,
    ) -> None:
        super().__init__(folder, log_name="mariadb.log", lifeline=lifeline)
        self.address = DatabaseAddress(
            host=LOOPBACK, port=port or free_port(), user=USER, password=kept_secret(folder / "password")
        )
        self._binaries = binaries
        self._flush_log_at_commit = flush_log_at_commit
        self._template = template

    async def stop(self) -> None:
        """Stop the server in an orderly way; its data stays."""
        if self._process is not None:
            await self._process.stop(patience=STOP_WITHIN)

    async def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL (see `DatabaseAddress`)."""
        return await self.address.create_database(name)

    async def _launch(self) -> GuardedProcess:
        return await GuardedProcess.start(
            self._command(),
            lifeline=self._lifeline,
            log=self.log,
            environment=dict(os.environ),
            folder=self.folder,
        )

    async def _answers(self, process: GuardedProcess) -> None:
        while True:
            process.require_running("MariaDB")
            try:
                await self.address.ping()
            except UnreachableError:
                await asyncio.sleep(0.02)
            else:
                return

    def _prepare(self) -> None:
        # At each start, so that the password in the file is the one that holds.
        login = f"'{USER}'@'{LOOPBACK}' IDENTIFIED BY '{self.address.password}'"
        statements = f"CREATE USER IF NOT EXISTS {login};\nALTER USER {login};\n"
        write_private(
            self.folder / "login.sql", f"{statements}GRANT ALL ON *.* TO '{USER}'@'{LOOPBACK}' WITH GRANT OPTION;\n"
        )
        (self.folder / "tmp").mkdir(exist_ok=True)
        data = self.folder / "data"
        if data.exists():
            return
        if self._template is None:
            self._install(data)
            return
        with exclusively(self._template.with_name(f"{self._template.name}.lock")):
            if not self._template.exists():
                self._install(self._template)
        shutil.copytree(self._template, data)

    def _install(self, data: Path) -> None:
        """Make a data folder, under its final name only when it is whole."""
        fresh = data.with_name(f"{data.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        # With --user the script would also change the owner of the system's PAM helper; a server run by root needs the
        # option, so it gets it here.
        wrapper = self.folder / "bootstrap"
        wrapper.write_text(f'#!/bin/sh\nexec "{self._binaries.server}" "$@" {" ".join(_as_root())}\n', encoding="utf-8")
        wrapper.chmod(0o700)
        command = [
            str(self._binaries.install),
            "--no-defaults",
            f"--datadir={fresh}",
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={getpass.getuser()}",
            "--skip-test-db",
            "--skip-name-resolve",
            "--innodb-log-file-size=32M",
        ]
        with self.log.open("ab") as log:
            finished = subprocess.run(
                command,
                env={**os.environ, "MYSQLD_BOOTSTRAP": str(wrapper)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_WITHIN.total_seconds(),
                check=False,
            )
        if finished.returncode != 0:
            raise ProcessFailedError(f"{self._binaries.install} failed\n{tail(self.log)}")
        fresh.rename(data)

    def _command(self) -> list[str]:
        return [
            str(self._binaries.server),
            "--no-defaults",
            *_as_root(),
            f"--datadir={self.folder / 'data'}",
            f"--tmpdir={self.folder / 'tmp'}",
            # Relative to the data folder: the path of a socket may have 107 bytes, which test folders exceed.
            "--socket=mariadb.sock",
            "--pid-file=mariadb.pid",
            f"--bind-address={LOOPBACK}",
            f"--port={self.address.port}",
            "--skip-name-resolve",
            "--skip-log-bin",
            f"--init-file={self.folder / 'login.sql'}",
            "--max-connections=400",
            "--character-set-server=utf8mb4",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=32M",
            f"--innodb-flush-log-at-trx-commit={self._flush_log_at_commit}",
        ]


def _as_root() -> list[str]:
    return ["--user=root"] if os.geteuid() == 0 else []
