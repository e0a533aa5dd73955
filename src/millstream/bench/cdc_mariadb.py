"""Change data capture from MariaDB: the same backlog as Postgres's, to Redis through a pipeline."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from millstream.cdc import ChangesReader, Mariadb, mariadb_options
from millstream.testing import MariadbProcess

PER_TRANSACTION = 1_000
_runs = itertools.count()


class MariadbBacklog:
    """A server with a log of changes, and where it began: pipelines begin there, as if they had been there first."""

    def __init__(self, server: MariadbProcess, scratch: str, changes: int) -> None:
        self._server, self._scratch = server, Path(scratch)
        self.changes = changes
        database = server.fresh_database()
        self.dsn, self._name = database.dsn, database.name
        database.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, customer int, amount decimal(10, 2), status text, note text)"
        )
        [(self._first, *_)] = database.execute("SHOW MASTER STATUS")
        options = {"dsn": self.dsn, "tables": "orders", "snapshot": "never", "segments": str(self._scratch / "began")}
        reader = ChangesReader(Mariadb(mariadb_options(options)))
        reader.initialOffset()
        reader.stop()
        self._write()

    def _write(self) -> None:
        """Half of it new rows, most of the rest updates, some deletes."""
        half, updates = self.changes // 2, self.changes * 2 // 5
        insert = (
            "INSERT INTO orders SELECT seq, seq MOD 1000, (seq MOD 9999) / 100, 'new', CONCAT('order number ', seq) "
            "FROM seq_{first}_to_{last}"
        )
        update = "UPDATE orders SET status = 'paid', amount = amount + 1 WHERE id BETWEEN {first} AND {last}"
        delete = "DELETE FROM orders WHERE id BETWEEN {first} AND {last}"
        database = self._server.main
        with database.connect(database=self._name) as connection, connection.cursor() as cursor:
            for statement, most in ((insert, half), (update, updates), (delete, self.changes - half - updates)):
                for first in range(1, most + 1, PER_TRANSACTION):
                    cursor.execute(statement.format(first=first, last=min(most, first + PER_TRANSACTION - 1)))

    def source(self) -> dict[str, Any]:
        """A pipeline's source that begins before the backlog."""
        segments = self._scratch / f"segments-{next(_runs)}"
        shutil.copytree(self._scratch / "began", segments)
        config = {"dsn": self.dsn, "tables": ["orders"], "snapshot": "never", "segments": str(segments)}
        return {"type": "mariadb", "config": config}

    def read_by_peer(self) -> float:
        """mariadb-binlog, which reads the same log and prints it, to nowhere."""
        words = ["mariadb-binlog", "--no-defaults", "--read-from-remote-server", "--host=127.0.0.1", "--user=root"]
        words += [f"--port={self._server.port}", "--to-last-log", self._first]
        began = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self.changes / (time.perf_counter() - began)
