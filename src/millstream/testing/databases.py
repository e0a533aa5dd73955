"""Real databases for tests, as processes with a data directory of their own: a PostgreSQL ready for logical
replication, and a MariaDB ready to be followed by its binary log.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from millstream.testing.servers import STARTING_S, free_port
from millstream.testing.waiting import wait_until

if TYPE_CHECKING:
    import psycopg
    import pymysql


class DatabaseProcess(ABC):
    """``settings`` are the server's own; they win over those that following it needs (``SETTINGS``).

    Such a server refuses to run as root, so root starts it as ``USER``, who owns its directory.
    """

    TITLE: ClassVar[str]
    USER: ClassVar[str]
    SETTINGS: ClassVar[Mapping[str, str]]
    SHUTDOWN: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self._settings = {**self.SETTINGS, **(settings or {})}
        self._own = tempfile.TemporaryDirectory(prefix=f"millstream-{self.TITLE.lower()}-")
        self.directory = Path(self._own.name)
        self._user = self.USER if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _install_words(self) -> Sequence[str]:
        """The command that makes ``data``."""

    @abstractmethod
    def _server_words(self) -> Sequence[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def _connects(self) -> bool:
        """Whether it lets us in by now."""

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def crashed(self) -> bool:
        """It ended, and nobody here ended it. ``log`` says why, and ``start`` starts it again."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> Self:
        """Returns when it answers. After ``kill`` it recovers, as after any crash."""
        if not self.data.exists():
            self._install()
        self._spawn()
        try:
            wait_until(self._answers, what=f"{self.TITLE} on port {self.port}", timeout_s=STARTING_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _spawn(self) -> None:
        self._said_before = len(self.log)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._server_words(), stdout=log, stderr=log, user=self._user, group=self._user, start_new_session=True
            )

    def _install(self) -> None:
        words = self._install_words()
        done = subprocess.run(
            words, capture_output=True, text=True, user=self._user, group=self._user, check=False, cwd=self.directory
        )
        if done.returncode:
            raise RuntimeError(f"{words[0]} failed: {(done.stdout + done.stderr)[-2000:]}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            if _STILL_THERE in self.log[self._said_before :]:
                self._spawn()  # a child of the server that was killed has not noticed yet
                return False
            raise RuntimeError(f"{self.TITLE} ended at once: {self.log[-2000:]}")
        return self._connects()

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(self.SHUTDOWN)
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


_STILL_THERE = "pre-existing shared memory block"
_DEBIAN = Path("/usr/lib/postgresql")


def postgres_binaries() -> Path | None:
    """Where initdb and postgres lie: the newest of Debian's versions, or wherever the path leads; None: nowhere."""
    versions = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(found).parent if found else None


@dataclass(frozen=True)
class PostgresDatabase:
    """One database of a server."""

    server: PostgresProcess
    name: str

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.server.port}/{self.name}"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """A connection in autocommit, unless told otherwise."""
        import psycopg

        return psycopg.connect(self.dsn, **{"autocommit": True, **options})

    def execute(self, *statements: str) -> list[Any]:
        """Runs each statement by itself; the rows of the last, where it has any."""
        with self.connect() as connection:
            rows: list[Any] = []
            for statement in statements:
                cursor = connection.execute(statement)
                rows = cursor.fetchall() if cursor.description else []
            return rows

    def drop(self) -> None:
        """With its slots, and whoever is connected."""
        wait_until(self._without_slots, what="the end of all who read a slot", timeout_s=STARTING_S)
        self.server.main.execute(f"DROP DATABASE {self.name} WITH (FORCE)")

    def _without_slots(self) -> bool:
        """Drops them. A reader that was cut off may be back before its slot is gone."""
        import psycopg

        slots = self.execute(
            "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = current_database()"
        )
        try:
            for slot, pid in slots:
                if pid is not None:
                    self.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
                self.execute(f"SELECT pg_drop_replication_slot('{slot}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True


class PostgresProcess(DatabaseProcess):
    """One PostgreSQL server. ``settings`` are lines of its configuration."""

    TITLE = "PostgreSQL"
    USER = "postgres"
    SHUTDOWN = signal.SIGINT  # a fast one: it waits for nobody
    SETTINGS: ClassVar[Mapping[str, str]] = {
        "wal_level": "logical",
        "fsync": "off",  # the tests kill processes, never the machine
        "max_wal_senders": "10",
        "max_replication_slots": "20",
        "max_connections": "60",
        "shared_buffers": "64MB",
        "wal_sender_timeout": "10s",
    }

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        binaries = postgres_binaries()
        if binaries is None:
            raise RuntimeError("PostgreSQL is not installed: run `make setup`")
        self.binaries = binaries
        super().__init__(settings)

    @property
    def main(self) -> PostgresDatabase:
        return PostgresDatabase(self, "postgres")

    def fresh_database(self) -> PostgresDatabase:
        """An empty one, with a name of its own."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return PostgresDatabase(self, name)

    def _install_words(self) -> list[str]:
        words = [str(self.binaries / "initdb"), "-D", str(self.data), "-U", "postgres", "-A", "trust"]
        return [*words, "-E", "UTF8", "--no-sync"]

    def _server_words(self) -> list[str]:
        words = [str(self.binaries / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.directory), **self._settings}
        for name, value in settings.items():
            words += ["-c", f"{name}={value}"]
        return words

    def _connects(self) -> bool:
        import psycopg

        try:
            self.main.connect(connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """As a crash does it. Its children would end by themselves soon; a restart needs them gone."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            pids = [int(word) for word in children.read_text().split()]
            self._process.send_signal(signal.SIGSTOP)  # or it would start others meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().kill()


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


class MariadbProcess(DatabaseProcess):
    """One MariaDB server. ``settings`` are options of its command line."""

    TITLE = "MariaDB"
    USER = "mysql"
    SETTINGS: ClassVar[Mapping[str, str]] = {
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

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        program = mariadb_server()
        if program is None:
            raise RuntimeError("MariaDB is not installed: run `make setup`")
        self._program = program
        super().__init__(settings)

    @property
    def main(self) -> MariadbDatabase:
        return MariadbDatabase(self, "mysql")

    def fresh_database(self) -> MariadbDatabase:
        """An empty one, with a name of its own."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return MariadbDatabase(self, name)

    def _install_words(self) -> list[str]:
        words = ["mariadb-install-db", "--no-defaults", f"--datadir={self.data}", "--skip-test-db"]
        words += ["--auth-root-authentication-method=normal", "--skip-name-resolve", "--innodb-log-file-size=64M"]
        return [*words, self._own_tmpdir]

    def _server_words(self) -> list[str]:
        words = [self._program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"]
        words += ["--bind-address=127.0.0.1", f"--socket={self.directory / 'socket'}", "--skip-name-resolve"]
        words.append(self._own_tmpdir)
        return [*words, *(f"--{name}={value}" for name, value in self._settings.items())]

    @property
    def _own_tmpdir(self) -> str:
        """A server that starts removes the temporary tables of its directory, also those of one that runs and crashes
        over it."""
        return f"--tmpdir={self.directory}"

    def _connects(self) -> bool:
        import pymysql

        try:
            self.main.connect(connect_timeout=2).close()
        except pymysql.err.OperationalError:
            return False
        return True
