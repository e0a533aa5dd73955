"""A real MariaDB for tests, ready to be followed by its binary log."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from millstream.testing.database_process import DatabaseProcess
from millstream.testing.waiting import wait_until

if TYPE_CHECKING:
    import pymysql


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
