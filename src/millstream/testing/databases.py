"""Database processes for tests, each with its own data directory: PostgreSQL with logical replication, and MariaDB with
a row-based binary log.
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

from millstream.testing.servers import START_TIMEOUT_S, free_port
from millstream.testing.waiting import wait_until

if TYPE_CHECKING:
    import psycopg
    import pymysql


class DatabaseProcess(ABC):
    """A database server process. ``settings`` override ``SETTINGS``, which change data capture needs.

    Database servers refuse to run as root, so root starts them as ``USER``, who owns the directory.
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
    def _install_command(self) -> Sequence[str]:
        """The command that creates the ``data`` directory."""

    @abstractmethod
    def _server_command(self) -> Sequence[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def _connects(self) -> bool:
        """Whether the server accepts connections."""

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
        """Whether the server ended without ``stop`` or ``kill``. ``log`` has the reason; ``start`` restarts it."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> Self:
        """Starts the server, and returns when it answers. After ``kill`` it recovers as after a crash."""
        if not self.data.exists():
            self._install()
        self._spawn()
        try:
            wait_until(self._answers, what=f"{self.TITLE} on port {self.port}", timeout_s=START_TIMEOUT_S)
        except BaseException:  # also after Ctrl-C: no server may stay behind
            self.kill()
            raise
        return self

    def _spawn(self) -> None:
        self._log_size_at_start = len(self.log)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._server_command(),
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                start_new_session=True,
            )

    def _install(self) -> None:
        command = self._install_command()
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, group=self._user, check=False, cwd=self.directory
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            if _SHARED_MEMORY_IN_USE in self.log[self._log_size_at_start :]:
                self._spawn()  # a child process of the killed server has not ended yet
                return False
            raise RuntimeError(f"{self.TITLE} exited during start: {self.log[-2000:]}")
        return self._connects()

    def kill(self) -> None:
        """Ends the process with SIGKILL, like a crash."""
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


_SHARED_MEMORY_IN_USE = "pre-existing shared memory block"
_DEBIAN = Path("/usr/lib/postgresql")


def postgres_binaries() -> Path | None:
    """The directory of initdb and postgres: the newest Debian version, or one on PATH; None if not installed."""
    versions = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    initdb = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(initdb).parent if initdb else None


@dataclass(frozen=True)
class PostgresDatabase:
    """One database of a server."""

    server: PostgresProcess
    name: str

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.server.port}/{self.name}"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Opens a connection, by default in autocommit mode."""
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
        """Drops the database with its replication slots, and disconnects its clients."""
        wait_until(self._drop_slots, what="the replication slots to be dropped", timeout_s=START_TIMEOUT_S)
        self.server.main.execute(f"DROP DATABASE {self.name} WITH (FORCE)")

    def _drop_slots(self) -> bool:
        """Drops all slots. False: a disconnected reader has reconnected and uses its slot again."""
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
    """A PostgreSQL server. ``settings`` are configuration parameters."""

    TITLE = "PostgreSQL"
    USER = "postgres"
    SHUTDOWN = signal.SIGINT  # fast shutdown, which does not wait for clients
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
        """Creates an empty database with a unique name."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return PostgresDatabase(self, name)

    def _install_command(self) -> list[str]:
        command = [str(self.binaries / "initdb"), "-D", str(self.data), "-U", "postgres", "-A", "trust"]
        return [*command, "-E", "UTF8", "--no-sync"]

    def _server_command(self) -> list[str]:
        command = [str(self.binaries / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.directory), **self._settings}
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _connects(self) -> bool:
        import psycopg

        try:
            self.main.connect(connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """Ends the server and its child processes with SIGKILL, because a restart fails while children still run."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            pids = [int(pid) for pid in children.read_text().split()]
            self._process.send_signal(signal.SIGSTOP)  # so that it starts no further children
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
        """Opens a connection, by default in autocommit mode."""
        import pymysql

        address = {"host": "127.0.0.1", "port": self.server.port, "user": "root", "database": self.name}
        defaults = {"autocommit": True, "charset": "utf8mb4", "connect_timeout": 5, "ssl_disabled": True}
        return pymysql.connect(**{**address, **defaults, **options})

    def execute(self, *statements: str) -> list[Any]:
        """Runs each statement by itself; the rows of the last, where it has any."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def purge_logs(self) -> None:
        """Removes all binary log files but the newest.

        A file in use by a reader is removed after the server has detected that the reader is disconnected.
        """
        [(newest, *_)] = self.execute("SHOW MASTER STATUS")

        def purged() -> bool:
            self.execute(f"PURGE BINARY LOGS TO '{newest}'")
            return bool(self.execute("SHOW BINARY LOGS")[0][0] == newest)

        wait_until(purged, what="the purge")

    def drop(self) -> None:
        self.server.main.execute(f"DROP DATABASE {self.name}")


class MariadbProcess(DatabaseProcess):
    """A MariaDB server. ``settings`` are command-line options."""

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
        """Creates an empty database with a unique name."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return MariadbDatabase(self, name)

    def _install_command(self) -> list[str]:
        command = ["mariadb-install-db", "--no-defaults", f"--datadir={self.data}", "--skip-test-db"]
        command += ["--auth-root-authentication-method=normal", "--skip-name-resolve", "--innodb-log-file-size=64M"]
        return [*command, self._own_tmpdir]

    def _server_command(self) -> list[str]:
        command = [self._program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"]
        command += ["--bind-address=127.0.0.1", f"--socket={self.directory / 'socket'}", "--skip-name-resolve"]
        command.append(self._own_tmpdir)
        return [*command, *(f"--{name}={value}" for name, value in self._settings.items())]

    @property
    def _own_tmpdir(self) -> str:
        """A temporary directory for this server only. A starting server removes all temporary tables in its directory,
        which would crash another server that uses the same one."""
        return f"--tmpdir={self.directory}"

    def _connects(self) -> bool:
        import pymysql

        try:
            self.main.connect(connect_timeout=2).close()
        except pymysql.err.OperationalError:
            return False
        return True
