"""Filter pushdown in a Spark session, on a real redis-server: results never change, and less is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, In
from pyspark.sql.pandas.types import to_arrow_schema

from millstream import BlockingBroker, open_blocking_broker
from millstream.model import TrimPolicy
from millstream.spark.filters import ColumnKind
from millstream.spark.options import source_options
from millstream.spark.reader import FilteringBatchReader
from millstream.spark.source import DEFAULT_SCHEMA

pytestmark = pytest.mark.spark

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
NOW_MS = 1_700_000_000_123


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


@pytest.fixture
def read(spark: SparkSession, redis_url: str) -> Iterator[Callable[..., DataFrame]]:
    """Reads batches with filter pushdown."""
    spark.conf.set(PUSHDOWN, "true")

    def load(schema: str | None = None, **options: str) -> DataFrame:
        reader = spark.read.format("redis_streams").options(**{"url": redis_url, "pushFilters": "true", **options})
        return (reader.schema(schema) if schema else reader).load()

    yield load
    spark.conf.unset(PUSHDOWN)


def fill(broker: BlockingBroker, streams: int) -> None:
    """Streams with times from 1970 to the end of timestamps and beyond; some are trimmed, one is empty."""
    for n in range(streams):
        stream = f"s{n}"
        for at, ms in enumerate([1, 999, 1000, 1001, NOW_MS - 1, NOW_MS, NOW_MS, NOW_MS + 1, 2**64 - 1]):
            broker.xadd(stream, {"event": str(at)}, id=f"{ms}-{at + n}")
        if n % 3 == 1:
            broker.xtrim(stream, TrimPolicy(max_len=6))
    broker.xadd("s-empty", {"event": "0"}, id="5-0")
    broker.xdel("s-empty", "5-0")


def random_condition(rng: random.Random, depth: int = 2) -> str:
    """A condition in SQL on the default columns."""
    kind = rng.randrange(10 if depth else 6)
    times = ["1970-01-01 00:00:00", "1969-12-31 23:59:59.999999", "1970-01-01 00:00:01", "1970-01-01 00:00:01.0005"]
    times += ["2023-11-14 22:13:20.123", "2023-11-14 22:13:20.1235", "0001-01-02 03:04:05", "9999-12-30 00:00:00"]
    time = f"TIMESTAMP '{rng.choice(times)} UTC'"
    entry_id = f"{rng.choice([1, 1000, NOW_MS, 2**64 - 1])}-{rng.randrange(9)}"
    comparison = rng.choice(["=", "<>", "<", "<=", ">", ">=", "<=>"])
    if kind == 0:
        return f"timestamp {comparison} {time}"
    if kind == 1:
        return f"timestamp BETWEEN {time} AND {time.replace('00:00:01', '00:00:02')}"
    if kind == 2:
        return f"id {comparison} '{entry_id}'"
    if kind == 3:
        return f"id IN ('{entry_id}', '{NOW_MS}-5', 'none'{rng.choice(['', ', NULL'])})"
    if kind == 4:
        return f"stream {rng.choice(['=', '<>', '>'])} 's{rng.randrange(4)}'"
    if kind == 5:
        return rng.choice(
            ["stream LIKE '%1'", "timestamp IS NULL", "id IS NOT NULL", "timestamp = NULL", "value = X'33'"]
        )
    operator = rng.choice([" AND ", " AND ", " OR "])
    joined = operator.join(f"({random_condition(rng, depth - 1)})" for _ in range(rng.randint(2, 3)))
    return rng.choice(["{}", "{}", "NOT ({})"]).format(joined)


def test_results_with_and_without_pushdown_are_the_same(spark, broker, read):
    fill(broker, 5)
    rng = random.Random(26)
    conditions = [random_condition(rng) for _ in range(24)]
    spark.conf.unset(PUSHDOWN)
    rows = read(subscribePattern="s.*").select("stream", "id", "timestamp", "value").collect()
    assert len(rows) == 3 * 9 + 2 * 6
    spark.conf.set(PUSHDOWN, "true")
    in_memory = spark.createDataFrame(rows, "stream STRING, id STRING, timestamp TIMESTAMP, value BINARY")

    def results(load: Callable[[], DataFrame]) -> list[list[tuple[str, str]]]:
        """The rows of each condition, three conditions in one job."""
        selected: list[list[tuple[str, str]]] = []
        for first in range(0, len(conditions), 3):
            group = conditions[first : first + 3]
            parts = [load().where(each).selectExpr(f"{at} AS at", "stream", "id") for at, each in enumerate(group)]
            joined = parts[0].union(parts[1]).union(parts[2]).collect()
            selected += [sorted((row["stream"], row["id"]) for row in joined if row["at"] == at) for at in range(3)]
        return selected

    pushed = results(lambda: read(subscribePattern="s.*"))
    for condition, with_pushdown, without in zip(conditions, pushed, results(lambda: in_memory), strict=True):
        assert with_pushdown == without, condition


def explained(rows: DataFrame, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The filters that the scan shows, and the condition that Spark evaluates."""
    capsys.readouterr()
    rows.explain("formatted")
    text = capsys.readouterr().out
    pushed, condition = (text.partition(title)[2].partition("\n")[0] for title in ("PushedFilters:", "Condition :"))
    return pushed, condition


def test_explain_shows_pushed_filters_and_spark_evaluates_the_others(broker, read, capsys):
    fill(broker, 2)
    rows = read(subscribePattern="s.*").where("timestamp >= '2023-01-01' AND id > '1' AND stream = 's0'")
    pushed, condition = explained(rows, capsys)
    assert "EqualTo(stream,s0)" in pushed
    assert "GreaterThanOrEqual(timestamp" in pushed
    assert "GreaterThan(id" not in pushed
    assert "id#" in condition
    assert "timestamp#" not in condition
    assert rows.count() == 4


def test_filters_are_not_pushed_without_the_option(broker, read, capsys):
    fill(broker, 2)
    rows = read(subscribePattern="s.*", pushFilters="false")
    pushed, condition = explained(rows.where("stream = 's0'"), capsys)
    assert pushed.strip() in ("", "[]")
    assert "stream#" in condition
    assert (rows.where("stream = 's0'").count(), rows.where("stream = 's1'").count(), rows.count()) == (9, 6, 15)


def test_spark_applies_pushed_filters_to_other_queries_of_the_same_dataframe(broker, read):
    """Why pushFilters is off by default. If this fails on a newer Spark, the option and its warning can go."""
    fill(broker, 2)
    rows = read(subscribePattern="s.*")
    assert rows.where("stream = 's0'").count() == 9
    assert rows.count() == 9, "15 rows are stored"


def test_columns_of_a_user_schema_are_pushed(broker, read):
    fill(broker, 2)
    rows = read("_id STRING, _stream STRING, event INT", subscribePattern="s.*").where(f"_id = '{NOW_MS}-5'")
    assert [(row["_id"], row["_stream"], row["event"]) for row in rows.collect()] == [(f"{NOW_MS}-5", "s0", 5)]


def test_streaming_read_with_a_filter_is_unchanged(spark, broker, read, redis_url, tmp_path: Path):
    fill(broker, 2)
    options = {"url": redis_url, "subscribePattern": "s.*", "startingOffsets": "earliest"}
    rows = spark.readStream.format("redis_streams").options(**options).load().where("stream = 's0'")
    collected: list[str] = []
    writer = rows.writeStream.foreachBatch(lambda batch, number: collected.extend(r["id"] for r in batch.collect()))
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert query.exception() is None
    assert len(collected) == 9


def test_only_selected_streams_and_ids_are_read(broker, redis_url):
    fill(broker, 4)
    options = source_options({"url": redis_url, "subscribePattern": "s.*", "minPartitions": "2"}, streaming=False)
    columns: dict[str, ColumnKind] = {"stream": "stream", "id": "id", "timestamp": "timestamp"}
    schema = to_arrow_schema(DEFAULT_SCHEMA, timezone="UTC")
    reader = FilteringBatchReader(options, schema, default_columns=True, filter_columns=columns)
    filters = [In(("stream",), ("s0", "s2")), In(("id",), (f"{NOW_MS}-5", f"{NOW_MS}-7", "2-0"))]
    assert reader.pushFilters(filters) == []
    ranges = [(r.stream, str(r.after), str(r.upto)) for each in reader.partitions() for r in each.ranges]
    bounds = [("1-18446744073709551615", "2-0"), (f"{NOW_MS}-4", f"{NOW_MS}-5"), (f"{NOW_MS}-6", f"{NOW_MS}-7")]
    assert ranges == [(stream, *bound) for stream in ("s0", "s2") for bound in bounds]
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    assert [value for batch in batches for value in batch.column("id").to_pylist()] == [f"{NOW_MS}-5", f"{NOW_MS}-7"]
    assert reader.pushFilters([EqualTo(("stream",), "missing")]) == []
    assert reader.partitions() == []
