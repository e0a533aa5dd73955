"""A real MariaDB for tests: its own data directory, a free loopback port, ready to be followed by its binary log."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from millstream.testing.servers import STARTING_S, free_port
from millstream.testing.waiting import wait_until

if TYPE_CHECKING:
    import pymysql

_SETTINGS = {
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-metadata": "FULL",
    "binlog-row-image": "FULL",
    "server-id": "1",
    "character-set-server": "utf8mb4",
    "max-connections": "60",
    "innodb-buffer-pool-size": "64M",
    "innodb-log-file-size": "64M",
    "innodb-flush-log-at-trx-commit": "2",  # the tests kill processes, never the machine
    "sync-binlog": "0",
    "performance-schema": "OFF",
}


def mariadb_server() -> str | None:
    """The server's program; None: it is not installed."""
    return shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True)
class MariadbDatabase:
    """One database of a server."""

    server: MariadbProcess
    name: str

    @property
    def dsn(self) -> str:
        return f"mariadb://root@127.0.0.1:{self.server.port}/{self.name}"

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        """A connection in autocommit, unless told otherwise."""
        import pymysql

        place = {"host": "127.0.0.1", "port": self.server.port, "user": "root", "database": self.name}
        ways = {"autocommit": True, "charset": "utf8mb4", "connect_timeout": 5, "ssl_disabled": True}
        return pymysql.connect(**{**place, **ways, **options})

    def execute(self, *statements: str) -> list[Any]:
        """Runs each statement by itself; the rows of the last, where it has any."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def purge_logs(self) -> None:
        """Leaves the newest file of the binary log alone. One that a reader held goes when the server has noticed that
        the reader is gone."""
        [(newest, *_)] = self.execute("SHOW MASTER STATUS")

        def purged() -> bool:
            self.execute(f"PURGE BINARY LOGS TO '{newest}'")
            return bool(self.execute("SHOW BINARY LOGS")[0][0] == newest)

        wait_until(purged, what="the purge")

    def drop(self) -> None:
        self.server.main.execute(f"DROP DATABASE {self.name}")


class MariadbProcess:
    """One MariaDB server. ``settings`` are options of its command line; they win over what is set here.

    It refuses to run as root, so root starts it as the user ``mysql``, who owns its directory.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        program = mariadb_server()
        if program is None:
            raise RuntimeError("MariaDB is not installed: run `make setup`")
        self._program = program
        self.port = free_port()
        self._settings = {**_SETTINGS, **(settings or {})}
        self._own = tempfile.TemporaryDirectory(prefix="millstream-mariadb-")
        self.directory = Path(self._own.name)
        self._user = "mysql" if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def main(self) -> MariadbDatabase:
        return MariadbDatabase(self, "mysql")

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def fresh_database(self) -> MariadbDatabase:
        """An empty one, with a name of its own."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return MariadbDatabase(self, name)

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Returns when it answers. After ``kill`` it recovers, as after any crash."""
        if not self.data.exists():
            self._install()
        words = [self._program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"]
        words += ["--bind-address=127.0.0.1", f"--socket={self.directory / 'socket'}", "--skip-name-resolve"]
        words += [f"--{name}={value}" for name, value in self._settings.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, user=self._user, group=self._user, start_new_session=True
            )
        try:
            wait_until(self._answers, what=f"MariaDB on port {self.port}", timeout_s=STARTING_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _install(self) -> None:
        words = ["mariadb-install-db", "--no-defaults", f"--datadir={self.data}", "--skip-test-db"]
        words += ["--auth-root-authentication-method=normal", "--skip-name-resolve", "--innodb-log-file-size=64M"]
        done = subprocess.run(
            words, capture_output=True, text=True, user=self._user, group=self._user, check=False, cwd=self.directory
        )
        if done.returncode:
            raise RuntimeError(f"mariadb-install-db failed: {(done.stdout + done.stderr)[-2000:]}")

    def _answers(self) -> bool:
        import pymysql

        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"mariadbd ended at once: {self.log[-2000:]}")
        try:
            self.main.connect(connect_timeout=2).close()
        except pymysql.err.OperationalError:
            return False
        return True

    @property
    def crashed(self) -> bool:
        """It ended, and nobody here ended it. ``log`` says why, and ``start`` starts it again."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self.kill()
        self._own.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
