"""Unusual streams: names that are not plain text, empty, recreated with smaller ids, with deleted entries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import wait_until
from millstream.testing.topologies import send_command

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


Start = Callable[..., tuple[Any, list[tuple[str, int]]]]


@pytest.fixture
def start(spark: SparkSession, redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a query; returns it and the list of its rows as (stream, event). Stops it when the test ends."""
    queries = []

    def begin(**options: str) -> tuple[Any, list[tuple[str, int]]]:
        rows = spark.readStream.format("redis_streams").option("url", redis_url).options(**options).load()
        rows_read: list[tuple[str, int]] = []

        def keep(batch: Any, number: int) -> None:
            rows_read.extend((row["stream"], int(bytes(row["value"]))) for row in batch.collect())

        writer = rows.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        queries.append(writer.start())
        return queries[-1], rows_read

    yield begin
    for query in queries:
        query.stop()


def add(broker: BlockingBroker, stream: str | bytes, first: int, last: int) -> None:
    """Entries whose ids are their events: ``first-0`` to ``last-0``."""
    for n in range(first, last + 1):
        broker.xadd(stream, {"event": str(n)}, id=f"{n}-0")


def wait_for_rows(rows_read: list[tuple[str, int]], count: int) -> None:
    wait_until(lambda: len(rows_read) >= count, what=f"{count} rows", timeout_s=90)


def test_stream_names_may_contain_commas_spaces_quotes_and_invalid_utf8(broker, start):
    names = [b" a,b ", b"caf\xe9", "naïve".encode(), b'q"\\', b"new\nline", b"odd}name"]
    for at, name in enumerate(names, 1):
        add(broker, name, at, at)
    text = {name: name.decode("utf-8", "surrogateescape") for name in names}
    pattern = "|".join(re.escape(name) for name in text.values() if name != text[b"caf\xe9"]) + "|caf."
    options = {"startingOffsets": "earliest", "group": "spark", "failOnDataLoss": "false"}
    _, rows_read = start(subscribePattern=pattern, **options)
    wait_for_rows(rows_read, len(names))
    add(broker, b"caf\xe9", 10, 10)
    wait_for_rows(rows_read, len(names) + 1)
    expected = {name.decode("utf-8", "backslashreplace"): at for at, name in enumerate(names, 1)}
    assert sorted(rows_read) == sorted([*expected.items(), ("caf\\xe9", 10)])
    wait_until(lambda: {g.lag for n in names for g in broker.group_info(n)} == {0}, what="the group", timeout_s=90)


def recreate(broker: BlockingBroker, stream: str, last: int) -> None:
    """Recreates the stream atomically, so that no reader sees it missing, with entries 1 to ``last``."""
    script = "redis.call('DEL', KEYS[1]) for n = 1, ARGV[1] do redis.call('XADD', KEYS[1], n .. '-0', 'event', n) end"
    send_command(broker, "EVAL", script, "1", stream, str(last))


def test_recreated_stream_with_smaller_ids_is_read_and_the_group_follows(broker, start):
    """If the group stayed at the old stream's end, safe trimming would treat the new entries as read."""
    options = {"subscribe": "s", "startingOffsets": "earliest", "failOnDataLoss": "false", "group": "spark"}

    def group_is_at(entry_id: str) -> None:
        wait_until(
            lambda: [str(g.last_delivered) for g in broker.group_info("s")] == [entry_id], what=entry_id, timeout_s=90
        )
        assert broker.group_info("s")[0].lag == 0

    add(broker, "s", 1001, 1010)
    query, rows_read = start(**options)
    wait_for_rows(rows_read, 10)
    group_is_at("1010-0")
    recreate(broker, "s", 4)
    wait_for_rows(rows_read, 14)
    add(broker, "s", 5, 6)
    wait_for_rows(rows_read, 16)
    assert [event for _, event in rows_read] == [*range(1001, 1011), *range(1, 7)]
    group_is_at("6-0")
    query.stop()
    recreate(broker, "s", 3)
    query, rows_read = start(**options)
    wait_for_rows(rows_read, 3)
    group_is_at("3-0")
    assert rows_read == [("s", 1), ("s", 2), ("s", 3)]
    assert query.exception() is None


def test_empty_streams_deleted_entries_and_xsetid_do_not_stop_a_query(broker, start):
    broker.create_group("s", "other", start="0")
    _, rows_read = start(subscribe="s,nothing", startingOffsets="earliest", group="spark", maxOffsetsPerTrigger="3")
    add(broker, "s", 1, 10)
    wait_for_rows(rows_read, 10)
    broker.xdel("s", ["3-0", "9-0", "10-0"])
    send_command(broker, "XSETID", "s", "50-0")
    add(broker, "s", 51, 55)
    wait_for_rows(rows_read, 15)
    broker.xdel("s", [f"{n}-0" for n in range(1, 56)])
    add(broker, "s", 56, 57)
    wait_for_rows(rows_read, 17)
    add(broker, "nothing", 1, 1)
    wait_for_rows(rows_read, 18)
    assert rows_read == [("s", n) for n in (*range(1, 11), *range(51, 58))] + [("nothing", 1)]
