"""A real PostgreSQL for tests: its own data directory, a free loopback port, ready for logical replication."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
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
    import psycopg

_DEBIAN = Path("/usr/lib/postgresql")
_SETTINGS = {
    "wal_level": "logical",
    "fsync": "off",  # the tests kill processes, never the machine
    "max_wal_senders": "10",
    "max_replication_slots": "20",
    "max_connections": "60",
    "shared_buffers": "64MB",
    "wal_sender_timeout": "10s",
}


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
        slots = self.execute(
            "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = current_database()"
        )
        for slot, pid in slots:
            if pid is not None:
                self.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
            self.execute(f"SELECT pg_drop_replication_slot('{slot}')")
        self.server.main.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


class PostgresProcess:
    """One PostgreSQL server. ``settings`` are lines of its configuration; they win over what is set here.

    It refuses to run as root, so root starts it as the user ``postgres``, who owns its directory.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        binaries = postgres_binaries()
        if binaries is None:
            raise RuntimeError("PostgreSQL is not installed: run `make setup`")
        self.binaries = binaries
        self.port = free_port()
        self._settings = {**_SETTINGS, **(settings or {})}
        self._own = tempfile.TemporaryDirectory(prefix="millstream-postgres-")
        self.directory = Path(self._own.name)
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def main(self) -> PostgresDatabase:
        return PostgresDatabase(self, "postgres")

    def fresh_database(self) -> PostgresDatabase:
        """An empty one, with a name of its own."""
        name = f"db_{secrets.token_hex(4)}"
        self.main.execute(f"CREATE DATABASE {name}")
        return PostgresDatabase(self, name)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Returns when it answers. After ``kill`` it recovers, as after any crash."""
        data = self.directory / "data"
        if not data.exists():
            self._run("initdb", "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        words = [str(self.binaries / "postgres"), "-D", str(data), "-p", str(self.port)]
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.directory), **self._settings}
        for name, value in settings.items():
            words += ["-c", f"{name}={value}"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, user=self._user, group=self._user, start_new_session=True
            )
        try:
            wait_until(self._answers, what=f"PostgreSQL on port {self.port}", timeout_s=STARTING_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"postgres ended at once: {self.log[-2000:]}")
        try:
            self.main.connect(connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *words: str) -> None:
        command = [str(self.binaries / program), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, group=self._user, check=False, cwd=self.directory
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")

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
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown: it waits for nobody
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self.kill()
        self._own.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
