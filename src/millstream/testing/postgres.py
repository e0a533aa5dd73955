"""A real PostgreSQL for tests, ready for logical replication."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from millstream.testing.database_process import DatabaseProcess

if TYPE_CHECKING:
    import psycopg

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
        slots = self.execute(
            "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = current_database()"
        )
        for slot, pid in slots:
            if pid is not None:
                self.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
            self.execute(f"SELECT pg_drop_replication_slot('{slot}')")
        self.server.main.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


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
