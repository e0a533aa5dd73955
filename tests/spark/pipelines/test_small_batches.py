"""A small batch is written from the driver, as a task of Spark would write it: the same entries, and a replay adds
nothing, whichever of the two wrote first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession

from millstream.pipelines import Runner, parse_pipeline
from millstream.pipelines.sinks import small_batches
from millstream.pipelines.sinks.redis import RedisSink
from millstream.pipelines.sinks.sink import TIME, Write
from millstream.pipelines.sinks.small_batches import SmallBatches
from millstream.spark.sink_options import Delivered
from millstream.testing import PostgresDatabase, RedisProcess, wait_until

pytestmark = pytest.mark.spark

SCHEMA = f"event string, id string, key string, headers string, {TIME} bigint"
SMALL, THROUGH_SPARK = True, False


@pytest.fixture
def client(redis_server: RedisProcess) -> redis.Redis:
    return redis.Redis(port=redis_server.port)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was decided for each batch that may be small."""
    decided: list[bool] = []
    write = SmallBatches.write

    def recorded(self: SmallBatches, rows: DataFrame, options: dict[str, str]) -> bool:
        decided.append(write(self, rows, options))
        return decided[-1]

    monkeypatch.setattr(SmallBatches, "write", recorded)
    return decided


def sink_to(url: str, *, previous_rows: int | None) -> RedisSink:
    """``previous_rows``: the size of the batch before."""
    sink = RedisSink.model_validate({"type": "redis", "config": {"id": "out", "uri": url, "stream": "events"}})
    if previous_rows is not None:
        sink._small_batches.written(Delivered(rows=previous_rows))
    return sink


def rows_of(spark: SparkSession, events: Sequence[str], *, partitions: int = 1) -> DataFrame:
    rows = [(event, f"id-{at}", None if at % 2 else "k", "{}", at) for at, event in enumerate(events)]
    return spark.createDataFrame(rows, SCHEMA).coalesce(1).repartition(partitions)


def write_batch(sink: RedisSink, rows: DataFrame, version: int) -> Delivered:
    return sink.write(rows, Write("app", version, "out", unobserved=True))


def test_driver_and_spark_write_the_same_entries_and_recognize_each_others(
    spark: SparkSession, redis_url: str, client: redis.Redis, decisions: list[bool]
) -> None:
    events = [f'{{"n":{n},"text":"é\\u0000"}}' for n in range(50)]
    rows = rows_of(spark, events)
    first = write_batch(sink_to(redis_url, previous_rows=50), rows, 1)
    by_driver = [fields for _, fields in client.xrange("events")]
    assert [fields[b"event"].decode() for fields in by_driver] == events
    assert write_batch(sink_to(redis_url, previous_rows=None), rows, 1) == first._replace(added=0, skipped=50)

    by_spark_first = write_batch(sink_to(redis_url, previous_rows=None), rows, 2)
    assert [fields for _, fields in client.xrange("events")][50:] == by_driver
    assert by_spark_first == first
    repeated = write_batch(sink_to(redis_url, previous_rows=50), rows, 2)
    assert repeated == first._replace(added=0, skipped=50)
    assert decisions == [SMALL, THROUGH_SPARK, THROUGH_SPARK, SMALL]
    assert client.xlen("events") == 100


@pytest.mark.parametrize(
    ("events", "partitions"),
    [
        pytest.param(["{}"] * (small_batches.MAX_ROWS + 1), 1, id="many rows"),
        pytest.param(["{}", '"' + "x" * small_batches.MAX_TEXT_BYTES + '"'], 1, id="a large row"),
        pytest.param(["{}", "{}"], 2, id="two partitions"),
    ],
)
def test_batch_that_is_not_small_is_written_by_spark(
    spark: SparkSession, redis_url: str, client: redis.Redis, decisions: list[bool], events: list[str], partitions: int
) -> None:
    sink = sink_to(redis_url, previous_rows=1)
    delivered = write_batch(sink, rows_of(spark, events, partitions=partitions), 1)
    assert decisions == [THROUGH_SPARK]
    assert delivered.added == len(events)
    stored = [fields[b"event"].decode() for _, fields in client.xrange("events")]
    assert sorted(stored) == sorted(events)


def test_largest_small_batch_is_written_whole(
    spark: SparkSession, redis_url: str, client: redis.Redis, decisions: list[bool]
) -> None:
    events = ["x" * small_batches.MAX_TEXT_BYTES, *(["{}"] * (small_batches.MAX_ROWS - 1))]
    assert write_batch(sink_to(redis_url, previous_rows=1), rows_of(spark, events), 1).added == small_batches.MAX_ROWS
    assert decisions == [SMALL]
    assert [fields[b"event"].decode() for _, fields in client.xrange("events")] == events


def test_permanent_error_is_the_one_that_spark_reports(
    spark: SparkSession, redis_url: str, client: redis.Redis, decisions: list[bool]
) -> None:
    client.set("events", "no stream")
    with pytest.raises(Exception, match="WrongKeyType"):
        write_batch(sink_to(redis_url, previous_rows=1), rows_of(spark, ["{}"]), 1)
    assert decisions == [THROUGH_SPARK]


def test_observed_rows_are_written_by_spark(
    spark: SparkSession, redis_url: str, client: redis.Redis, decisions: list[bool]
) -> None:
    sink_to(redis_url, previous_rows=1).write(rows_of(spark, ["{}"]), Write("app", 1, "out"))
    assert decisions == []
    assert client.xlen("events") == 1


SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: postgres, config: {dsn: "DSN", tables: [orders], create: true}}
  sinks: [{type: redis, config: {id: out, uri: "URL", stream: events}}]
  checkpoint: {path: CHECKPOINT}
"""


def test_changes_of_a_database_are_written_from_the_driver(
    spark: SparkSession,
    postgres: PostgresDatabase,
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
    decisions: list[bool],
) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (0)")
    text = SPEC.replace("DSN", postgres.dsn).replace("URL", redis_url).replace("CHECKPOINT", str(tmp_path))
    with Runner([parse_pipeline(text)], session=spark):
        for number in range(1, 5):
            wait_until(lambda count=number: client.xlen("events") == count, what=f"{number} entries", timeout_s=60)
            postgres.execute(f"INSERT INTO orders VALUES ({number})")
        wait_until(lambda: client.xlen("events") == 5, what="5 entries", timeout_s=60)
    assert decisions == [THROUGH_SPARK, SMALL, SMALL, SMALL, SMALL]
