"""The contract of the source, with a real Spark session and a real redis-server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import wait_until
from millstream.wire.commands import Command

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


@pytest.fixture
def read(spark: SparkSession, redis_url: str) -> Callable[..., DataFrame]:
    def load(schema: str | None = None, **options: str) -> DataFrame:
        reader = spark.read.format("redis_streams").option("url", redis_url).options(**options)
        return (reader.schema(schema) if schema else reader).load()

    return load


class Stream:
    """A streaming read into lists of rows, by name of the run; restartable from its checkpoint."""

    def __init__(self, spark: SparkSession, url: str, where: Path) -> None:
        self.spark, self.url, self.where = spark, url, where
        self.rows: dict[str, list[Any]] = {}

    def start(self, name: str, available_now: bool = True, **options: str) -> Any:
        rows = self.spark.readStream.format("redis_streams").option("url", self.url).options(**options).load()
        collected = self.rows.setdefault(name, [])
        writer = rows.writeStream.foreachBatch(lambda batch, number: collected.extend(batch.collect()))
        writer = writer.option("checkpointLocation", str(self.where / "checkpoint"))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(self, name: str, **options: str) -> list[Any]:
        query = self.start(name, **options)
        assert query.awaitTermination(60)
        assert query.exception() is None
        return self.rows[name]

    def offsets(self) -> list[dict[str, Any]]:
        files = sorted((self.where / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        return [json.loads(path.read_text().splitlines()[-1]) for path in files]


@pytest.fixture
def stream(spark: SparkSession, redis_url: str, tmp_path: Path) -> Stream:
    return Stream(spark, redis_url, tmp_path)


def fill(broker: BlockingBroker, stream: str, count: int, first: int = 0) -> list[str]:
    return [str(i) for i in broker.xadd_many(stream, [{"event": str(first + n)} for n in range(count)])]


def reported(progress: Any) -> Any:
    """The streams' ends in a query's progress."""
    return json.loads(progress["sources"][0]["latestOffset"])


def values(rows: list[Any]) -> list[int]:
    return sorted(int(bytes(row["value"])) for row in rows)


# --- batch ---


def test_batch_read_has_the_default_columns(broker, read):
    entry = broker.xadd("orders", {"event": b"\x00\xff", "region": "eu"})
    (row,) = read(subscribe="orders").collect()
    assert (row["stream"], row["id"], bytes(row["value"])) == ("orders", str(entry), b"\x00\xff")
    assert int(row["timestamp"].timestamp() * 1000) == entry.ms
    assert {name: bytes(value) for name, value in row["fields"].items()} == {"event": b"\x00\xff", "region": b"eu"}


def test_one_stream_is_split_into_partitions_without_loss(broker, read):
    ids = fill(broker, "orders", 3000)
    rows = read(subscribe="orders", minPartitions="4", pageSize="100")
    assert 2 <= rows.rdd.getNumPartitions() <= 4
    assert [row["id"] for row in rows.collect()] == ids


def test_many_streams_share_few_partitions(broker, read):
    for n in range(40):
        fill(broker, f"s{n}", 5, first=5 * n)
    rows = read(subscribePattern="s.*", minPartitions="3")
    assert rows.rdd.getNumPartitions() == 3
    assert values(rows.collect()) == list(range(200))


def test_batch_read_uses_starting_and_ending_offsets(broker, read):
    ids = fill(broker, "orders", 10)
    rows = read(
        subscribe="orders",
        startingOffsets=json.dumps({"orders": ids[2]}),
        endingOffsets=json.dumps({"orders": ids[6]}),
    )
    assert values(rows.collect()) == [3, 4, 5, 6]
    broker.xadd("timed", {"event": "1"}, id="1000-0")
    broker.xadd("timed", {"event": "2"}, id="2000-0")
    broker.xadd("timed", {"event": "3"}, id="2000-1")
    assert values(read(subscribe="timed", startingTimestamp="2000").collect()) == [2, 3]


def test_missing_stream_has_no_rows(read):
    assert read(subscribe="nothing").collect() == []
    assert read(subscribePattern="nothing.*").collect() == []


def test_a_schema_maps_fields_by_name(broker, read):
    broker.xadd("orders", {"n": "1", "price": "2.50", "name": "ä"})
    broker.xadd("orders", {"n": "one", "name": "b"})
    schema = "_id STRING, n INT, price DECIMAL(10,2), name STRING, _corrupt_record STRING"
    first, second = read(schema, subscribe="orders").collect()
    assert (first["n"], str(first["price"]), first["name"], first["_corrupt_record"]) == (1, "2.50", "ä", None)
    assert (second["n"], second["price"], second["name"]) == (None, None, "b")
    assert json.loads(second["_corrupt_record"]) == {"n": "one", "name": "b"}
    assert read("n INT", subscribe="orders", mode="DROPMALFORMED").count() == 1
    with pytest.raises(PySparkException, match="does not fit"):
        read("n INT", subscribe="orders", mode="FAILFAST").collect()


def test_large_entries_are_read_in_small_pages(broker, read):
    big = b"x" * 1_000_000
    broker.xadd_many("big", [{"event": big} for _ in range(20)])
    assert read(subscribe="big").selectExpr("sum(length(value))").first()[0] == 20_000_000


# --- streaming ---


def test_batch_and_streaming_reads_agree(broker, read, stream):
    fill(broker, "orders", 500)
    streamed = stream.run("agree", subscribe="orders", startingOffsets="earliest", minPartitions="3")
    batch = read(subscribe="orders").collect()
    assert sorted(streamed, key=lambda row: row["id"]) == sorted(batch, key=lambda row: row["id"])


def test_row_limit_is_kept_and_available_now_ends_at_the_initial_end(broker, stream):
    fill(broker, "orders", 100)
    options = {"subscribe": "orders", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "30", "minPartitions": "2"}
    query = stream.start("limited", **options)
    assert query.awaitTermination(60)
    counts = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert counts == [30, 30, 30, 10]
    offsets = stream.offsets()
    assert [offset["streams"]["orders"]["added"] for offset in offsets] == [30, 60, 90, 100]
    assert [len(offset["streams"]["orders"].get("splits", ())) for offset in offsets] == [1, 1, 1, 1]


def test_restart_continues_from_its_checkpoint_with_other_options(broker, stream):
    fill(broker, "orders", 50)
    first = stream.run("restart1", subscribe="orders", startingOffsets="earliest", minPartitions="4")
    fill(broker, "orders", 70, first=50)
    second = stream.run("restart2", subscribe="orders", minPartitions="1", pageSize="7", maxOffsetsPerTrigger="20")
    assert values(first) == list(range(50))
    assert values(second) == list(range(50, 120))


def test_new_streams_are_read_and_an_idle_query_starts_no_batch(broker, stream):
    fill(broker, "s1", 3)
    query = stream.start("later", available_now=False, subscribePattern="s[0-9]+", startingOffsets="earliest")
    try:
        wait_until(lambda: len(stream.rows["later"]) == 3, what="the first stream", timeout_s=90)
        fill(broker, "s2", 4, first=3)
        wait_until(lambda: len(stream.rows["later"]) == 7, what="the new stream", timeout_s=90)
        broker.create_group("s3", "unused", start="0")
        wait_until(lambda: query.status["message"] == "Waiting for data to arrive", what="an idle query", timeout_s=90)
        polled = len(stream.offsets())
        before = json.dumps(query.lastProgress["sources"][0]["endOffset"])
        fill(broker, "unrelated", 1)
        wait_until(lambda: not query.status["isTriggerActive"], what="another poll")
        assert len(stream.offsets()) == polled == 2
        assert json.dumps(query.lastProgress["sources"][0]["endOffset"]) == before
    finally:
        query.stop()


def test_new_query_starts_at_latest(broker, stream):
    fill(broker, "orders", 5)
    assert stream.run("fresh", subscribe="orders") == []
    fill(broker, "orders", 2, first=5)
    assert values(stream.run("fresh2", subscribe="orders")) == [5, 6]


def test_progress_has_lag_and_rate(broker, stream):
    fill(broker, "orders", 100)
    query = stream.start(
        "lagging", subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="40", group="spark"
    )
    assert query.awaitTermination(60)
    reports = [reported(progress) for progress in query.recentProgress]
    assert [report["streams"]["orders"]["lag"] for report in reports][:3] == [60, 20, 0]
    assert query.recentProgress[0]["sources"][0]["numInputRows"] == 40
    assert query.recentProgress[0]["processedRowsPerSecond"] > 0


def test_progress_is_published_as_the_groups_position(broker, stream):
    fill(broker, "orders", 30)
    stream.run("grouped", subscribe="orders", startingOffsets="earliest", group="spark", maxOffsetsPerTrigger="10")
    (group,) = broker.group_info("orders")
    assert (group.name, group.entries_read, group.lag) == ("spark", 30, 0)
    last = broker.stream_info("orders").last_generated
    assert group.last_delivered == last
    fill(broker, "orders", 5)
    (group,) = broker.group_info("orders")
    assert group.lag == 5
    assert broker.trim_safely("orders", max_len=0) == 30
    ahead = broker.stream_info("orders").last_generated
    broker.set_group_position("orders", "spark", ahead, entries_read=35)
    stream.run("grouped2", subscribe="orders", group="spark")
    (group,) = broker.group_info("orders")
    assert (group.last_delivered, group.lag) == (ahead, 0)


def test_safe_trimming_while_a_query_runs_loses_nothing(broker, stream):
    fill(broker, "orders", 100)
    query = stream.start(
        "trimmed", available_now=False, subscribe="orders", startingOffsets="earliest", group="g", pageSize="20"
    )
    try:
        wait_until(lambda: broker.group_info("orders"), what="the group", timeout_s=90)
        for first in range(100, 1000, 100):
            fill(broker, "orders", 100, first=first)
            broker.trim_safely("orders", max_len=0)
        wait_until(lambda: len(stream.rows["trimmed"]) == 1000, what="all rows", timeout_s=90)

        def emptied() -> bool:
            broker.trim_safely("orders", max_len=0)
            return broker.xlen("orders") == 0

        wait_until(emptied, what="the finished batches to be published and trimmed", timeout_s=90)
    finally:
        query.stop()
    assert values(stream.rows["trimmed"]) == list(range(1000))


# --- data loss ---


def test_entries_trimmed_before_planning_are_a_counted_error(broker, stream):
    fill(broker, "orders", 10)
    stream.run("loss1", subscribe="orders", startingOffsets="earliest")
    fill(broker, "orders", 20, first=10)
    from millstream.model import TrimPolicy

    broker.xtrim("orders", TrimPolicy(max_len=5))
    query = stream.start("loss2", subscribe="orders")
    with pytest.raises(PySparkException, match=r"15 entries of stream 'orders' .* were trimmed before they were read"):
        query.awaitTermination(60)
    query = stream.start("loss3", subscribe="orders", failOnDataLoss="false")
    assert query.awaitTermination(60)
    assert values(stream.rows["loss3"]) == [25, 26, 27, 28, 29]
    assert reported(query.recentProgress[0])["streams"]["orders"]["lost"] == 15


def test_entries_trimmed_between_planning_and_reading_are_counted_in_the_progress(broker, stream):
    """Only tasks can detect this: when the driver planned the batch, all entries existed."""
    from millstream.model import TrimPolicy

    fill(broker, "orders", 20)
    values_read: list[int] = []

    def trim_and_read(batch: DataFrame, number: int) -> None:
        if number == 0:
            fill(broker, "orders", 10, first=20)
            broker.xtrim("orders", TrimPolicy(max_len=3))  # the batch of 20, and 7 of the next one
        for _ in range(2):
            values_read.extend(values(batch.collect()))

    options = {"url": stream.url, "subscribe": "orders", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    rows = stream.spark.readStream.format("redis_streams").options(**options, minPartitions="2").load()
    writer = rows.writeStream.foreachBatch(trim_and_read).option("checkpointLocation", str(stream.where / "checkpoint"))
    query = writer.start()
    try:
        wait_until(lambda: len(values_read) == 6, what="the remaining entries", timeout_s=90)
        fill(broker, "orders", 1, first=30)
        wait_until(lambda: len(values_read) == 8, what="another batch", timeout_s=90)
        wait_until(lambda: query.lastProgress["batchId"] >= 2, what="its progress", timeout_s=90)
    finally:
        query.stop()
    assert values_read == [27, 28, 29] * 2 + [30] * 2
    progress = reported(query.lastProgress)["streams"]["orders"]
    assert (progress["lost"], progress["gaps"]) == (27, 2)
    assert not broker.transport.call(Command((b"KEYS", b"*gaps*")))


def test_reader_without_write_permission_continues_after_a_gap(broker, stream):
    broker.transport.call(Command((b"ACL", b"SETUSER", b"readonly", b"on", b"nopass", b"~orders", b"+@all")))
    from millstream.model import TrimPolicy

    fill(broker, "orders", 20)
    values_read: list[int] = []

    def trim_and_read(batch: DataFrame, number: int) -> None:
        broker.xtrim("orders", TrimPolicy(max_len=3))
        values_read.extend(values(batch.collect()))

    url = stream.url.replace("redis://", "redis://readonly:x@")
    options = {"url": url, "subscribe": "orders", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    rows = stream.spark.readStream.format("redis_streams").options(**options, maxOffsetsPerTrigger="10").load()
    writer = rows.writeStream.foreachBatch(trim_and_read).option("checkpointLocation", str(stream.where / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert query.exception() is None
    assert values_read == [17, 18, 19]


def test_deletions_make_a_loss_possible_instead_of_certain(broker, stream):
    fill(broker, "orders", 5)
    stream.run("del1", subscribe="orders", startingOffsets="earliest")
    ids = fill(broker, "orders", 5, first=5)
    broker.xdel("orders", ids[:1])
    from millstream.model import TrimPolicy

    broker.xtrim("orders", TrimPolicy(max_len=2))
    query = stream.start("del2", subscribe="orders")
    with pytest.raises(PySparkException, match="possibly"):
        query.awaitTermination(60)


def test_recreated_stream_is_an_error_or_read_from_its_beginning(broker, stream):
    fill(broker, "orders", 10)
    stream.run("recreated1", subscribe="orders", startingOffsets="earliest")
    broker.delete_stream("orders")
    fill(broker, "orders", 3)
    query = stream.start("recreated2", subscribe="orders")
    with pytest.raises(PySparkException, match="recreated"):
        query.awaitTermination(60)
    assert values(stream.run("recreated3", subscribe="orders", failOnDataLoss="false")) == [0, 1, 2]


# --- secrets ---


def test_password_is_not_in_plans_checkpoints_or_errors(broker, redis_url, spark, tmp_path):
    broker.transport.call(Command((b"ACL", b"SETUSER", b"reader", b"on", b">hush-hush", b"~*", b"+@all")))
    fill(broker, "orders", 5)
    secret = tmp_path / "password"
    secret.write_text("hush-hush\n")
    addresses = [
        {"url": redis_url.replace("redis://", "redis://reader:hush-hush@")},
        {"url": redis_url, "username": "reader", "passwordFile": str(secret)},
    ]
    for at, address in enumerate(addresses):
        rows = spark.read.format("redis_streams").options(subscribe="orders", **address).load()
        assert rows.count() == 5
        assert "hush" not in rows._jdf.queryExecution().toString()
        stream = Stream(spark, address["url"], tmp_path / str(at))
        options = {name: value for name, value in address.items() if name != "url"}
        assert len(stream.run(f"secret{at}", subscribe="orders", startingOffsets="earliest", **options)) == 5
        with pytest.raises(PySparkException) as caught:
            spark.read.format("redis_streams").options(
                subscribe="orders", startingOffsets="?", **address
            ).load().count()
        assert "hush" not in str(caught.value)
        files = [path for path in (tmp_path / str(at)).rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if b"hush" in path.read_bytes()]


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "subscribe"),
        ({"subscribe": "a", "subscribePattern": "b"}, "subscribe"),
        ({"subscribe": "a", "colour": "red"}, "colour"),
        ({"subscribe": "a", "startingOffsets": '{"a": "x"}'}, "startingOffsets"),
        ({"subscribe": "a", "url": "local://"}, "millstream serve"),
    ],
)
def test_invalid_option_is_named_in_the_error(read, options: dict[str, str], named: str):
    with pytest.raises(PySparkException, match=re.escape(named)):
        read(**options).collect()


def test_unreachable_server_and_wrong_password_name_the_option(read, broker):
    from millstream.testing import free_port

    with pytest.raises(PySparkException, match=r"BrokerUnavailable.*option url"):
        read(subscribe="a", url=f"redis://127.0.0.1:{free_port()}", deadlineMs="500").collect()

    broker.transport.call(Command((b"ACL", b"SETUSER", b"reader", b"on", b">hush", b"~*", b"+@all")))
    with pytest.raises(PySparkException, match=r"AuthenticationFailed.*passwordEnv") as caught:
        read(subscribe="a", username="reader", passwordEnv="PATH").collect()
    assert "hush" not in str(caught.value)
