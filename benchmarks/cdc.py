"""Change data capture from PostgreSQL: to Redis through a pipeline, decoding alone, a snapshot, and batch after batch;
and from MariaDB, the same backlog, to Redis.

``MILLSTREAM_BENCH_CHANGES`` sets the length of the backlog: the goals are for the default (5,000,000), which takes so
long that the start of a query does not matter.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import Progress, Result, interleaved
from millstream.cdc.decoding import Decoding
from millstream.cdc.mariadb.database import Mariadb, mariadb_options
from millstream.cdc.postgres.database import Postgres, change_options
from millstream.cdc.postgres.decode import decode_changes
from millstream.cdc.postgres.pgoutput import Relation
from millstream.cdc.reader import ChangesReader
from millstream.cdc.segments import read_segment
from millstream.pipelines import Pipeline, Runner
from millstream.pipelines.plan import make_plan
from millstream.pipelines.session import start_session
from millstream.testing import MariadbProcess, PostgresProcess, RedisProcess, mariadb_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHANGES = int(os.environ.get("MILLSTREAM_BENCH_CHANGES", "5000000"))
BATCH = 500_000
PER_TRANSACTION = 1_000
FLAT_BATCHES = 50
DECODED_BYTES = 64 << 20
"""Changes of the backlog that are decoded without a pipeline: the peer needs seconds for them."""
_runs = itertools.count()


def run(rounds: int, progress: Progress) -> list[Result]:
    settings = {"max_replication_slots": "64", "max_wal_size": "8GB", "synchronous_commit": "off"}
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch,
        PostgresProcess(settings) as postgres,
        RedisProcess() as redis,
    ):
        slots = _slots(postgres, 2 * (rounds + 1) + 3)
        progress(f"writing a backlog of {CHANGES:,} changes, in transactions of {PER_TRANSACTION:,}")
        _write_backlog(postgres)
        session = start_session([make_plan(_pipeline(postgres, redis, scratch, "warm", "never"))], "local[2]")
        try:
            ours = partial(_through_pipeline, session, postgres, redis, scratch, slots)
            peer = partial(_recvlogical, postgres, slots)
            progress("warming up")
            ours()
            progress("Postgres to Redis, and pg_recvlogical to /dev/null")
            stream, received = interleaved(rounds, ours, peer)
            progress("decoding alone")
            segments = _queued(postgres, next(slots), Path(scratch, "decode"))
            decoded, plain = interleaved(rounds, partial(_decode, segments), partial(_decode_plainly, segments))
            progress("a snapshot to Redis, and COPY to /dev/null")
            snapshot, copied = interleaved(
                rounds, partial(_snapshot, session, postgres, redis, scratch), partial(_copied, postgres)
            )
            mariadb = _mariadb(rounds, progress, session, redis, scratch)
        finally:
            session.stop()
        progress(f"{FLAT_BATCHES} batches, and again during an open transaction")
        growth = _growth(postgres, next(slots), Path(scratch, "flat"))
        with postgres.main.connect(autocommit=False) as other:
            other.execute("INSERT INTO orders VALUES (-1, 1, 1, 'open', 'open')")
            growth = max(growth, _growth(postgres, next(slots), Path(scratch, "flat-open")))
            other.rollback()
    return [
        Result("cdc_postgres", stream, "changes/s", "pg_recvlogical to /dev/null", received, ">= 0.25 x"),
        Result("cdc_decode", decoded, "changes/s", "a tight loop in Python", plain, ">= 3 x"),
        Result("cdc_snapshot", snapshot, "rows/s", "COPY TO STDOUT", copied, ">= 0.15 x"),
        *(Result("cdc_mariadb", *measured, f">= {stream:.0f}") for measured in mariadb),
        Result("cdc_flat", growth, "x", None, None, "<= 1.2"),
    ]


def _mariadb(
    rounds: int, progress: Progress, session: SparkSession, redis: RedisProcess, scratch: str
) -> list[tuple[float, str, str, float]]:
    """Measures our pipeline and the peer once; no results if no MariaDB server is installed."""
    if mariadb_server() is None:
        progress("no MariaDB is installed: it is left out")
        return []
    with MariadbProcess({"max-binlog-size": "1G"}) as server:
        progress(f"writing a backlog of {CHANGES:,} changes into MariaDB")
        backlog = MariadbBacklog(server, scratch, CHANGES)

        def ours() -> float:
            count, took = _run(session, redis, _piped(backlog.source(), redis, scratch))
            assert count == CHANGES, f"{count} of {CHANGES} changes reached Redis"
            return count / took

        progress("MariaDB to Redis, and mariadb-binlog to /dev/null")
        figures = interleaved(rounds, ours, backlog.read_by_peer)
    return [(figures[0], "changes/s", "mariadb-binlog to /dev/null", figures[1])]


def _slots(postgres: PostgresProcess, count: int) -> Iterator[str]:
    postgres.main.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, customer int, amount numeric(10, 2), status text, note text)",
        "CREATE PUBLICATION bench FOR TABLE orders",
    )
    names = [f"bench_{number}" for number in range(count)]
    for name in names:
        postgres.main.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return iter(names)


def _write_backlog(postgres: PostgresProcess) -> None:
    """Half of the changes are new rows, most others are updates, some are deletes. The remaining rows are for the
    snapshot."""
    half = CHANGES // 2
    insert = (
        "INSERT INTO orders SELECT i, i %% 1000, (i %% 9999) / 100.0, 'new', 'order number ' || i "
        "FROM generate_series(%s::int, %s::int) AS i"
    )
    update = "UPDATE orders SET status = 'paid', amount = amount + 1 WHERE id BETWEEN %s AND %s"
    delete = "DELETE FROM orders WHERE id BETWEEN %s AND %s"
    with postgres.main.connect() as connection:
        for statement, last in (
            (insert, half),
            (update, CHANGES * 2 // 5),
            (delete, CHANGES - half - CHANGES * 2 // 5),
        ):
            for first in range(1, last + 1, PER_TRANSACTION):
                connection.execute(statement, (first, min(last, first + PER_TRANSACTION - 1)))
        connection.execute("CHECKPOINT")


def _pipeline(
    postgres: PostgresProcess, redis: RedisProcess, scratch: str, slot: str, snapshot: str, **more: Any
) -> Pipeline:
    source = {
        "dsn": postgres.main.dsn,
        "tables": ["orders"],
        "slot": slot,
        "publication": "bench",
        "snapshot": snapshot,
        **more,
    }
    return _piped({"type": "postgres", "config": source}, redis, scratch)


def _piped(source: dict[str, Any], redis: RedisProcess, scratch: str) -> Pipeline:
    name = f"bench-{next(_runs)}"
    return Pipeline.model_validate(
        {
            "apiVersion": "millstream/v1",
            "kind": "Pipeline",
            "metadata": {"name": name},
            "spec": {
                "source": source,
                "sinks": [{"type": "redis", "config": {"id": "out", "uri": redis.url, "stream": "changes"}}],
                "batch": {"max_events": BATCH},
                "checkpoint": {"path": f"{scratch}/{name}"},
            },
        }
    )


def _run(session: SparkSession, redis: RedisProcess, pipeline: Pipeline) -> tuple[int, float]:
    """Returns the number of entries that reached Redis, and the seconds."""
    import redis as client_library

    client = client_library.Redis(port=redis.port)
    client.flushall()
    runner = Runner([pipeline], once=True, session=session)
    began = time.perf_counter()
    with runner:
        [made] = runner.runs.values()
        while made.check() == "running":
            time.sleep(0.05)
        took = time.perf_counter() - began
    assert made.state == "finished", made.error
    count = int(client.xlen("changes"))
    client.flushall()
    return count, took


def _through_pipeline(
    session: SparkSession, postgres: PostgresProcess, redis: RedisProcess, scratch: str, slots: Iterator[str]
) -> float:
    count, took = _run(session, redis, _pipeline(postgres, redis, scratch, next(slots), "never"))
    assert count == CHANGES, f"{count} of {CHANGES} changes reached Redis"
    return count / took


def _recvlogical(postgres: PostgresProcess, slots: Iterator[str]) -> float:
    [(end,)] = postgres.main.execute("SELECT pg_current_wal_lsn()")
    words = [str(postgres.binaries / "pg_recvlogical"), "-d", postgres.main.dsn, "--slot", next(slots), "--start"]
    words += ["-o", "proto_version=1", "-o", "publication_names=bench", "-f", "/dev/null", "--endpos", end, "--no-loop"]
    began = time.perf_counter()
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    return CHANGES / (time.perf_counter() - began)


def _snapshot(session: SparkSession, postgres: PostgresProcess, redis: RedisProcess, scratch: str) -> float:
    slot = f"snapshot_{next(_runs)}"
    count, took = _run(session, redis, _pipeline(postgres, redis, scratch, slot, "initial", create=True))
    postgres.main.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    [(rows,)] = postgres.main.execute("SELECT count(*) FROM orders")
    assert count == rows, f"{count} of {rows} rows reached Redis"
    return count / took


def _copied(postgres: PostgresProcess) -> float:
    [(rows,)] = postgres.main.execute("SELECT count(*) FROM orders")
    words = [str(postgres.binaries / "psql"), "-d", postgres.main.dsn, "-c", "COPY orders TO STDOUT"]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return float(rows) / (time.perf_counter() - began)


@contextmanager
def _reader(postgres: PostgresProcess, slot: str, directory: Path) -> Iterator[ChangesReader]:
    options = {"dsn": postgres.main.dsn, "tables": "orders", "slot": slot, "publication": "bench", "snapshot": "never"}
    made = ChangesReader(Postgres(change_options({**options, "segments": str(directory), "segmentsShared": "true"})))
    try:
        yield made
    finally:
        made.stop()


def _queued(postgres: PostgresProcess, slot: str, directory: Path) -> list[Path]:
    """Some segments of the backlog, as a session writes them."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    with _reader(postgres, slot, directory) as reader:
        reader.prepareForTriggerAvailableNow()
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadMaxRows(CHANGES))
        reader.partitions(start, end)
    paths, size = [], 0
    for path in sorted(directory.glob("0*.seg")):
        paths.append(path)
        size += path.stat().st_size
        if size > DECODED_BYTES:
            break
    return paths


def _decode(segments: list[Path]) -> float:
    how = Decoding("bench", "postgres")
    began = time.perf_counter()
    rows: int = sum(decode_changes(read_segment(path), how).num_rows for path in segments)
    return rows / (time.perf_counter() - began)


def _decode_plainly(segments: list[Path]) -> float:
    began = time.perf_counter()
    rows = sum(_plain_rows(path) for path in segments)
    return rows / (time.perf_counter() - began)


def _plain_rows(path: Path) -> int:
    """The peer: an optimised Python loop over the rows that produces the same JSON."""
    segment = read_segment(path)
    body = bytes(segment.body)
    tables = {
        int(number): Relation.from_json(description) for number, description in segment.metadata["relations"].items()
    }
    length_at, dumps = struct.Struct(">I").unpack_from, json.dumps
    events: list[tuple[str, str]] = []
    lsn = 0
    for start in segment.starts.tolist():
        at = start
        kind = body[at]
        if kind == 66:  # begin
            lsn = int.from_bytes(body[at + 1 : at + 9])
        elif kind in (73, 85, 68):  # insert, update, delete
            relation = tables[length_at(body, at + 1)[0]]
            key_alone = body[at + 5] == 75
            at += 8
            members = []
            for column in relation.columns:
                value_kind = body[at]
                if value_kind == 116:
                    [size] = length_at(body, at + 1)
                    text = body[at + 5 : at + 5 + size].decode()
                    members.append(f'"{column.name}":{text if column.kind == "number" else dumps(text)}')
                    at += 5 + size
                else:
                    at += 1
                    if value_kind == 110 and not key_alone:
                        members.append(f'"{column.name}":null')
            events.append((f"bench:{lsn}:{len(events)}", "{" + ",".join(members) + "}"))
    return len(events)


def _growth(postgres: PostgresProcess, slot: str, directory: Path) -> float:
    """The cost of the last batches of a backlog divided by that of the first: planning, reading ahead, decoding."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    costs: list[float] = []
    with _reader(postgres, slot, directory) as reader:
        reader.prepareForTriggerAvailableNow()
        start, read_limit = reader.initialOffset(), ReadMaxRows(max(1, CHANGES // FLAT_BATCHES))
        while True:
            began = time.perf_counter()
            end = reader.latestOffset(start, read_limit)
            if end is start:
                break
            for partition in reader.partitions(start, end):
                for _ in reader.read(partition):
                    pass
            costs.append(time.perf_counter() - began)
            start = end
    typical: Callable[[list[float]], float] = statistics.median
    # The first batch is not measured: only it opens the slot and waits for the server.
    return typical(costs[-6:-1]) / typical(costs[1:6])


class MariadbBacklog:
    """A server with a log of changes, and the position at which the log starts, where every pipeline starts too."""

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
        """Half of the changes are new rows, most others are updates, some are deletes."""
        half, updates = self.changes // 2, self.changes * 2 // 5
        insert = (
            "INSERT INTO orders SELECT seq, seq MOD 1000, (seq MOD 9999) / 100, 'new', CONCAT('order number ', seq) "
            "FROM seq_{first}_to_{last}"
        )
        update = "UPDATE orders SET status = 'paid', amount = amount + 1 WHERE id BETWEEN {first} AND {last}"
        delete = "DELETE FROM orders WHERE id BETWEEN {first} AND {last}"
        database = self._server.main
        with database.connect(database=self._name) as connection, connection.cursor() as cursor:
            for statement, count in ((insert, half), (update, updates), (delete, self.changes - half - updates)):
                for first in range(1, count + 1, PER_TRANSACTION):
                    cursor.execute(statement.format(first=first, last=min(count, first + PER_TRANSACTION - 1)))

    def source(self) -> dict[str, Any]:
        """A pipeline's source that begins before the backlog."""
        segments = self._scratch / f"segments-{next(_runs)}"
        shutil.copytree(self._scratch / "began", segments)
        config = {"dsn": self.dsn, "tables": ["orders"], "snapshot": "never", "segments": str(segments)}
        return {"type": "mariadb", "config": config}

    def read_by_peer(self) -> float:
        """mariadb-binlog: it reads the same log and prints it to /dev/null."""
        words = ["mariadb-binlog", "--no-defaults", "--read-from-remote-server", "--host=127.0.0.1", "--user=root"]
        words += [f"--port={self._server.port}", "--to-last-log", self._first]
        began = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self.changes / (time.perf_counter() - began)
