"""Streams that are not as one expects: odd names, none at all, made anew with smaller ids, full of tombstones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import wait_until
from millstream.testing.topologies import say

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


Start = Callable[..., tuple[Any, list[tuple[str, int]]]]


@pytest.fixture
def start(spark: SparkSession, redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a query and answers it with the list that it fills: (stream, event) of every row. Stops it at the end."""
    queries = []

    def begin(**options: str) -> tuple[Any, list[tuple[str, int]]]:
        rows = spark.readStream.format("redis_streams").option("url", redis_url).options(**options).load()
        seen: list[tuple[str, int]] = []

        def keep(batch: Any, number: int) -> None:
            seen.extend((row["stream"], int(bytes(row["value"]))) for row in batch.collect())

        writer = rows.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        queries.append(writer.start())
        return queries[-1], seen

    yield begin
    for query in queries:
        query.stop()


def add(broker: BlockingBroker, stream: str | bytes, first: int, last: int) -> None:
    """Entries whose ids are their events: ``first-0`` to ``last-0``."""
    for n in range(first, last + 1):
        broker.xadd(stream, {"event": str(n)}, id=f"{n}-0")


def came(seen: list[tuple[str, int]], count: int) -> None:
    wait_until(lambda: len(seen) >= count, what=f"{count} rows", timeout_s=90)


def test_names_with_commas_spaces_quotes_and_bytes_that_are_no_text(broker, start):
    names = [b" a,b ", b"caf\xe9", "naïve".encode(), b'q"\\', b"new\nline", b"odd}name"]
    for at, name in enumerate(names, 1):
        add(broker, name, at, at)
    text = {name: name.decode("utf-8", "surrogateescape") for name in names}
    pattern = "|".join(re.escape(name) for name in text.values() if name != text[b"caf\xe9"]) + "|caf."
    options = {"startingOffsets": "earliest", "group": "spark", "failOnDataLoss": "false"}
    _, seen = start(subscribePattern=pattern, **options)
    came(seen, len(names))
    add(broker, b"caf\xe9", 10, 10)
    came(seen, len(names) + 1)
    expected = {name.decode("utf-8", "backslashreplace"): at for at, name in enumerate(names, 1)}
    assert sorted(seen) == sorted([*expected.items(), ("caf\\xe9", 10)])
    wait_until(lambda: {g.lag for n in names for g in broker.group_info(n)} == {0}, what="the group", timeout_s=90)


def make_anew(broker: BlockingBroker, stream: str, last: int) -> None:
    """In one step, so that nobody sees it gone: entries 1 to ``last``."""
    script = "redis.call('DEL', KEYS[1]) for n = 1, ARGV[1] do redis.call('XADD', KEYS[1], n .. '-0', 'event', n) end"
    say(broker, "EVAL", script, "1", stream, str(last))


def test_a_stream_that_was_made_anew_with_smaller_ids_is_read_and_the_group_follows(broker, start):
    """Left at the old stream's end, the group would make safe trimming take the new one for read."""
    options = {"subscribe": "s", "startingOffsets": "earliest", "failOnDataLoss": "false", "group": "spark"}

    def group_is_at(place: str) -> None:
        wait_until(lambda: [str(g.last_delivered) for g in broker.group_info("s")] == [place], what=place, timeout_s=90)
        assert broker.group_info("s")[0].lag == 0

    add(broker, "s", 1001, 1010)
    query, seen = start(**options)
    came(seen, 10)
    group_is_at("1010-0")
    make_anew(broker, "s", 4)
    came(seen, 14)
    add(broker, "s", 5, 6)
    came(seen, 16)
    assert [event for _, event in seen] == [*range(1001, 1011), *range(1, 7)]
    group_is_at("6-0")
    query.stop()
    make_anew(broker, "s", 3)
    query, seen = start(**options)
    came(seen, 3)
    group_is_at("3-0")
    assert seen == [("s", 1), ("s", 2), ("s", 3)]
    assert query.exception() is None


def test_a_stream_without_entries_tombstones_and_xsetid(broker, start):
    broker.create_group("s", "other", start="0")
    _, seen = start(subscribe="s,nothing", startingOffsets="earliest", group="spark", maxOffsetsPerTrigger="3")
    add(broker, "s", 1, 10)
    came(seen, 10)
    broker.xdel("s", ["3-0", "9-0", "10-0"])
    say(broker, "XSETID", "s", "50-0")
    add(broker, "s", 51, 55)
    came(seen, 15)
    broker.xdel("s", [f"{n}-0" for n in range(1, 56)])
    add(broker, "s", 56, 57)
    came(seen, 17)
    add(broker, "nothing", 1, 1)
    came(seen, 18)
    assert seen == [("s", n) for n in (*range(1, 11), *range(51, 58))] + [("nothing", 1)]
