"""The contract of the sink, with a real Spark session and a real redis-server."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker.scripts import retention
from millstream.testing import RedisProcess, free_port

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


@pytest.fixture
def save(redis_url: str) -> Callable[..., None]:
    def write(rows: DataFrame, mode: str = "append", **options: str) -> None:
        rows.write.format("redis_streams").mode(mode).option("url", redis_url).options(**options).save()

    return write


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).select(sf.col("id").cast("string").alias("value"))


def values(broker: BlockingBroker, stream: str) -> list[int]:
    return [int(entry.fields[b"event"]) for entry in broker.xrange(stream)]


def copy_query(spark: SparkSession, url: str, where: Path, source: dict[str, str], sink: dict[str, str]) -> Any:
    rows = spark.readStream.format("redis_streams").option("url", url).options(**source).load()
    writer = rows.writeStream.format("redis_streams").option("url", url).options(**sink)
    return writer.option("checkpointLocation", str(where)).trigger(availableNow=True).start()


def forget_last_commit(checkpoint: Path) -> None:
    """The state after a driver crashed between the sink's write and Spark's commit."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def run(query: Any) -> Any:
    assert query.awaitTermination(90)
    assert query.exception() is None
    return query


# --- batch ---


def test_report_counts_added_and_skipped_rows(spark, broker, save, tmp_path):
    times = sf.when(sf.col("id") != 7, sf.col("id") + 1000).alias("at")
    rows = spark.range(0, 1000, 1, 3).select(sf.col("id").cast("string").alias("event"), sf.lit("x").alias("k"), times)
    report = tmp_path / "report.json"
    options = {"stream": "out", "txnAppId": "app", "report": str(report), "timeColumn": "at", "also.b.stream": "other"}
    expected = {"rows": 1000, "bytes": 10 + 90 * 2 + 900 * 3, "oldest": 1000, "newest": 1999, "dropped": 0}
    for version, added in (("1", 1000), ("1", 0), ("2", 1000)):
        save(rows, txnVersion=version, **options)
        reported = json.loads(report.read_text())
        target_counts = {"added": added, "skipped": 1000 - added, "dropped": 0}
        assert reported.pop("places") == {"sink": target_counts, "b": target_counts}
        assert (reported.pop("added"), reported.pop("skipped")) == (2 * added, 2000 - 2 * added)
        assert reported == expected, "the rows of one write, for any number of targets and attempts"
    save(rows.where("id < 0"), txnVersion="3", **options)
    reported = json.loads(report.read_text())
    assert (reported["rows"], reported["bytes"], reported["oldest"], reported["added"], reported["skipped"]) == (
        0,
        0,
        None,
        0,
        0,
    )
    assert [broker.xlen("out"), broker.xlen("other")] == [2000, 2000]
    assert set(broker.xrange("out")[0].fields) == {b"event", b"k"}, "the time column is not a field"


def test_every_row_is_written_once_and_in_order_within_its_partition(spark, broker, save):
    save(numbers(spark, 5000, 3), stream="out", chunkRows="700")
    written = values(broker, "out")
    assert sorted(written) == list(range(5000))
    for first, last in ((0, 1666), (1666, 3333), (3333, 5000)):
        assert [n for n in written if first <= n < last] == list(range(first, last))


def test_fields_columns_routes_and_names(spark, broker, save):
    rows = spark.createDataFrame([("eu", 1, None), ("us", 2, "x")], "region STRING, n INT, note STRING")
    save(rows.coalesce(1), stream="orders.${region}")
    assert [entry.fields for entry in broker.xrange("orders.eu")] == [{b"region": b"eu", b"n": b"1"}]
    assert [entry.fields for entry in broker.xrange("orders.us")] == [{b"region": b"us", b"n": b"2", b"note": b"x"}]
    maps = spark.sql("SELECT 'm' AS stream, map('a', '1', 'b', '2') AS fields")
    save(maps)
    assert [entry.fields for entry in broker.xrange("m")] == [{b"a": b"1", b"b": b"2"}]


def test_rows_that_were_read_can_be_written_back_with_all_fields(spark, broker, save, redis_url):
    broker.xadd("in", {"a": b"\x00\xff", "b": "2"})
    broker.xadd("in", {"event": "x"})
    rows = spark.read.format("redis_streams").options(url=redis_url, subscribe="in").load()
    save(rows, stream="back")
    assert [entry.fields for entry in broker.xrange("back")] == [entry.fields for entry in broker.xrange("in")]


def test_same_version_adds_nothing_and_a_lower_version_is_rejected(spark, broker, save):
    rows = numbers(spark, 100)
    save(rows, stream="out", txnAppId="job", txnVersion="7", chunkRows="10")
    save(rows, stream="out", txnAppId="job", txnVersion="7", chunkRows="33")
    assert sorted(values(broker, "out")) == list(range(100))
    save(rows, stream="out", txnAppId="job", txnVersion="8")
    assert Counter(values(broker, "out")) == Counter(list(range(100)) * 2)
    with pytest.raises(PySparkException, match="StaleWriter"):
        save(rows, stream="out", txnAppId="job", txnVersion="7")
    assert broker.xlen("out") == 200


def test_replay_with_different_rows_is_an_error(spark, broker, save):
    save(numbers(spark, 100, 1), stream="out", txnAppId="job", txnVersion="1")
    different_rows = numbers(spark, 100, 1).select(sf.concat(sf.lit("1"), sf.col("value")).alias("value"))
    with pytest.raises(PySparkException, match="NonDeterministicReplay"):
        save(different_rows, stream="out", txnAppId="job", txnVersion="1")
    with pytest.raises(PySparkException, match="NonDeterministicReplay"):
        save(numbers(spark, 40, 1), stream="out", txnAppId="job", txnVersion="1")
    assert values(broker, "out") == list(range(100))


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
def test_replay_split_into_other_tasks_is_rejected_and_adds_nothing(spark, broker, save, redis_url, tasks):
    client = redis.Redis.from_url(redis_url)
    options = {"stream": "out", "txnAppId": "job", "txnVersion": "1"}
    save(numbers(spark, 8, 4), **options)
    save(numbers(spark, 8, 4), **options)
    with pytest.raises(PySparkException, match="NonDeterministicReplay"):
        save(numbers(spark, 8, tasks), **options)
    assert sorted(values(broker, "out")) == list(range(8))
    save(numbers(spark, 8, 4), **options)
    save(numbers(spark, 8, tasks), **{**options, "txnVersion": "2"})
    assert broker.xlen("out") == 16
    [record] = client.keys("*once.tasks*")
    assert client.pttl(record) > 0


def test_replay_with_fewer_tasks_after_a_crash_is_detected_at_commit(spark, broker, save, redis_url):
    options = {"stream": "out", "txnAppId": "job", "txnVersion": "1"}
    save(numbers(spark, 8, 4), **options)
    client = redis.Redis.from_url(redis_url)
    client.delete(*client.keys("*once.tasks*"))  # as if the driver had crashed before the commit
    with pytest.raises(PySparkException, match="NonDeterministicReplay"):
        save(numbers(spark, 8, 2), **options)


def test_streaming_replay_of_files_with_fewer_tasks_is_rejected(spark, broker, redis_url, tmp_path):
    for number in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.txt").write_text(f"{2 * number}\n{2 * number + 1}\n")

    def query() -> Any:
        rows = spark.readStream.schema("value STRING").text(str(tmp_path / "in"))
        writer = rows.writeStream.format("redis_streams").options(url=redis_url, stream="out")
        return writer.option("checkpointLocation", str(tmp_path / "place")).trigger(availableNow=True).start()

    setting = "spark.sql.files.minPartitionNum"
    try:
        spark.conf.set(setting, "4")
        run(query())
        forget_last_commit(tmp_path / "place")
        spark.conf.set(setting, "1")
        replay = query()
        with pytest.raises(PySparkException, match="NonDeterministicReplay"):
            replay.awaitTermination(90)
        assert sorted(values(broker, "out")) == list(range(8))
        spark.conf.set(setting, "4")
        run(query())
    finally:
        spark.conf.unset(setting)
    assert sorted(values(broker, "out")) == list(range(8))


def test_plain_batch_writes_are_independent_of_each_other(spark, broker, save):
    save(numbers(spark, 10), stream="out")
    save(numbers(spark, 10), stream="out")
    assert broker.xlen("out") == 20


def test_two_sinks_into_one_stream_from_one_batch(spark, broker, redis_url, tmp_path):
    broker.xadd_many("in", [{"event": str(n)} for n in range(50)])

    def twice(batch: DataFrame, number: int) -> None:
        for sink in ("plain", "copy"):
            rows = batch.select("value").write.format("redis_streams").mode("append")
            rows.options(url=redis_url, stream="out", txnAppId="job", txnVersion=str(number), sinkId=sink).save()

    source = spark.readStream.format("redis_streams").options(url=redis_url, subscribe="in", startingOffsets="earliest")
    writer = source.load().writeStream.foreachBatch(twice).option("checkpointLocation", str(tmp_path / "c"))
    run(writer.trigger(availableNow=True).start())
    assert Counter(values(broker, "out")) == Counter(list(range(50)) * 2)
    forget_last_commit(tmp_path / "c")
    run(writer.trigger(availableNow=True).start())
    assert broker.xlen("out") == 100


@pytest.mark.parametrize("delivery", ["exactly_once", "exactly_once_by_event_id"])
def test_several_targets_are_written_in_one_pass_and_a_replay_adds_nothing(spark, broker, save, tmp_path, delivery):
    made = spark.sparkContext.accumulator(0)

    def count(batches):
        for batch in batches:
            made.add(batch.num_rows)
            yield batch

    rows = numbers(spark, 3000).mapInArrow(count, "value STRING").withColumn("e", sf.col("value"))
    options = {
        "delivery": delivery,
        "stream": "here",
        "also.b.stream": "there",
        "also.c.stream": "there",
        "content": "value",
    }
    if delivery == "exactly_once_by_event_id":
        options |= {"eventIdColumn": "e"}
    for _ in range(2):
        save(rows, txnAppId="places", txnVersion="1", **options)
    once = list(range(3000))
    assert made.value == 2 * 3000, "a pass makes its rows once"
    assert sorted(values(broker, "here")) == once
    # Event ids are not bound to a sink: a second row with the same id is skipped, whatever its sink id.
    twice = sorted(once * 2) if delivery == "exactly_once" else once
    assert sorted(values(broker, "there")) == twice


def test_a_query_into_two_servers(spark, broker, redis_url, tmp_path):
    broker.xadd_many("in", [{"event": str(number)} for number in range(500)])
    with RedisProcess() as second_server:
        source = {"subscribe": "in", "startingOffsets": "earliest"}
        sink = {"stream": "out", "also.mirror.url": second_server.url}
        run(copy_query(spark, redis_url, tmp_path / "c", source, sink))
        forget_last_commit(tmp_path / "c")
        run(copy_query(spark, redis_url, tmp_path / "c", source, sink))
        with open_blocking_broker(second_server.url) as mirror:
            assert values(broker, "out") == values(mirror, "out") == list(range(500))


def test_event_ids_recognise_rows_without_a_stable_order(spark, broker, save):
    rows = spark.range(200).selectExpr("cast(id AS STRING) AS value", "concat('e', id) AS event_id")
    options = {"stream": "out", "delivery": "exactly_once_by_event_id", "eventIdColumn": "event_id"}
    save(rows.repartition(3), content="value", **options)
    save(rows.orderBy(sf.rand(7)).repartition(2), content="value", **options)
    assert sorted(values(broker, "out")) == list(range(200))


def test_explicit_ids_are_kept_and_checked_before_anything_is_written(spark, broker, save):
    rows = spark.range(1, 101, 1, 1).selectExpr("cast(id AS STRING) AS value", "concat(id, '-7') AS at")
    for _ in range(2):
        save(rows, stream="out", idColumn="at", content="value", chunkRows="30", txnAppId="job", txnVersion="1")
    assert [str(entry.id) for entry in broker.xrange("out")] == [f"{n}-7" for n in range(1, 101)]
    with pytest.raises(PySparkException, match="IdTooSmall"):
        save(rows, stream="out", idColumn="at", content="value")
    late = spark.range(1, 3, 1, 1).selectExpr("'x' AS value", "concat(500 - id, '-0') AS at")
    with pytest.raises(PySparkException, match="IdTooSmall"):
        save(late, stream="out", idColumn="at", content="value")
    assert broker.xlen("out") == 100


def test_at_least_once_adds_every_time(spark, broker, save):
    for _ in range(2):
        save(numbers(spark, 10), stream="out", delivery="at_least_once")
    assert broker.xlen("out") == 20
    assert broker.list_streams("*") == ["out"]
    assert not broker.exists("{out}.once:job/sink")


def test_hard_cap_limits_the_stream(spark, broker, save):
    save(numbers(spark, 1000, 1), stream="out", maxlen="100")
    assert values(broker, "out") == list(range(900, 1000))


def test_unread_entries_removed_by_a_hard_cap_are_counted(broker):
    from millstream.model import TrimPolicy
    from millstream.spark.fan_out import cap

    broker.xadd_many("out", [{"event": str(n)} for n in range(50)])
    broker.create_group("out", "slow", start="0", entries_read=0)
    broker.create_group("out", "uncounted", start="0")
    broker.xreadgroup("out", "slow", "c", count=10)
    broker.xreadgroup("out", "uncounted", "c", count=40)
    assert cap(broker, "out", TrimPolicy(max_len=45)) == 0
    assert cap(broker, "out", TrimPolicy(max_len=20)) == 20
    assert cap(broker, "out", TrimPolicy(max_len=20)) == 0
    assert cap(broker, "out", TrimPolicy(max_len=5)) == 15
    assert broker.run(retention.losses, "out") == {"slow": 35, "uncounted": 5}
    assert cap(broker, "nothing", TrimPolicy(max_len=20)) == 0


def test_hard_cap_of_a_query_records_losses_of_groups(spark, broker, redis_url, tmp_path):
    broker.create_group("out", "slow", start="0")
    broker.xadd_many("in", [{"event": str(n)} for n in range(300)])
    source = {"subscribe": "in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "120"}
    for delivery in ("exactly_once", "at_least_once"):
        sink = {"stream": "out", "maxlen": "100", "delivery": delivery}
        run(copy_query(spark, redis_url, tmp_path / delivery, source, sink))
    assert broker.run(retention.losses, "out") == {"slow": 500}


def test_server_that_is_out_of_memory_for_a_while_delays_the_write(spark, broker, save):
    from millstream.wire.commands import Command

    def limit(size: bytes) -> None:
        broker.transport.call(Command((b"CONFIG", b"SET", b"maxmemory", size)))

    limit(b"1")
    release = threading.Timer(1.5, limit, (b"0",))
    release.start()
    try:
        save(numbers(spark, 500), stream="out", deadlineMs="30000")
    finally:
        release.join()
        limit(b"0")
    assert sorted(values(broker, "out")) == list(range(500))


def test_durability_that_the_server_does_not_support_is_rejected(spark, save, broker):
    with pytest.raises(PySparkException, match="DurabilityUnavailable"):
        save(numbers(spark, 10), stream="out", durability="fsynced")
    assert broker.xlen("out") == 0


# --- streaming ---


def test_stream_to_stream_and_the_last_commit_deleted(spark, broker, redis_url, tmp_path):
    broker.xadd_many("in", [{"event": str(n)} for n in range(300)])
    source = {"subscribe": "in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "120", "minPartitions": "2"}
    run(copy_query(spark, redis_url, tmp_path, source, {"stream": "out", "chunkRows": "50"}))
    assert sorted(values(broker, "out")) == list(range(300))
    forget_last_commit(tmp_path)
    broker.xadd_many("in", [{"event": str(n)} for n in range(300, 350)])
    # The batch is replayed with another chunk size and another number of partitions, and adds nothing.
    source = {"subscribe": "in", "maxOffsetsPerTrigger": "1000", "minPartitions": "4", "pageSize": "13"}
    run(copy_query(spark, redis_url, tmp_path, source, {"stream": "out", "chunkRows": "7"}))
    assert sorted(values(broker, "out")) == list(range(350))


def test_two_queries_into_one_stream(spark, broker, redis_url, tmp_path):
    for name in ("a", "b"):
        broker.xadd_many(name, [{"event": str(n)} for n in range(100)])
    queries = [
        copy_query(spark, redis_url, tmp_path / n, {"subscribe": n, "startingOffsets": "earliest"}, {"stream": "out"})
        for n in ("a", "b")
    ]
    for query in queries:
        run(query)
    assert Counter(values(broker, "out")) == Counter(list(range(100)) * 2)


def test_stream_to_stream_to_a_consumer_group(spark, broker, redis_url, tmp_path):
    broker.create_group("out", "workers", start="0")
    broker.xadd_many("in", [{"event": str(n)} for n in range(40)])
    source = {"subscribe": "in", "startingOffsets": "earliest", "group": "spark"}
    run(copy_query(spark, redis_url, tmp_path, source, {"stream": "out"}))
    received = []
    while deliveries := broker.xreadgroup("out", "workers", "w", count=15):
        received += [int(delivery.fields[b"event"]) for delivery in deliveries if delivery.fields]
        assert broker.xack("out", "workers", [delivery.id for delivery in deliveries]) == len(deliveries)
    assert sorted(received) == list(range(40))
    assert [(group.name, group.lag) for group in broker.group_info("in")] == [("spark", 0)]


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "stream"),
        ({"stream": "o", "content": "fields"}, "content"),
        ({"stream": "o", "colour": "red"}, "colour"),
        ({"stream": "o.${nowhere}"}, "nowhere"),
        ({"stream": "o", "txnAppId": "a"}, "txnVersion"),
        ({"stream": "o", "url": "local://"}, "millstream serve"),
    ],
)
def test_invalid_option_is_named_in_the_error(spark, broker, save, options: dict[str, str], named: str):
    with pytest.raises(PySparkException, match=re.escape(named)):
        save(numbers(spark, 1), **options)
    assert broker.list_streams("*") == []


def test_unreachable_server_wrong_password_and_overwrite_are_errors(spark, broker, save, redis_url, tmp_path):
    with pytest.raises(PySparkException, match=r"BrokerUnavailable.*option url"):
        save(numbers(spark, 1), stream="o", url=f"redis://127.0.0.1:{free_port()}", deadlineMs="500")
    with pytest.raises(PySparkException, match=r"AuthenticationFailed.*passwordEnv"):
        save(numbers(spark, 1), stream="o", username="absent", passwordEnv="PATH")
    with pytest.raises(PySparkException, match="never overwritten"):
        save(numbers(spark, 1), mode="overwrite", stream="o")
    source = {"subscribe": "in", "startingOffsets": "earliest"}
    broker.xadd("in", {"event": "1"})
    sinks = [
        ({"url": f"redis://127.0.0.1:{free_port()}", "deadlineMs": "500"}, r"BrokerUnavailable.*option url"),
        ({"username": "absent", "passwordEnv": "PATH"}, r"AuthenticationFailed.*passwordEnv"),
    ]
    for at, (wrong, named) in enumerate(sinks):
        query = copy_query(spark, redis_url, tmp_path / str(at), source, {"stream": "o", **wrong})
        with pytest.raises(PySparkException, match=named):
            query.awaitTermination(60)
    assert broker.xlen("o") == 0
    broker.set("text", "x")
    with pytest.raises(PySparkException, match="WrongKeyType"):
        save(numbers(spark, 1), stream="text")
