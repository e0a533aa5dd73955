"""Bulk append and append_once use one protocol: a replay may use the other one, with other chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker.context import DEFAULT_LIMITS
from millstream.broker.scripts.append_once import Digest, Once
from millstream.errors import NonDeterministicReplay, StaleWriter
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.testing.servers import ServedBroker

VALUES = [b"x" * (n % 7) + b"%d\r\n" % n for n in range(500)]


@pytest.fixture(params=["redis", "millstream serve"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "redis":
        yield request.getfixturevalue("redis_url")
    else:
        with ServedBroker() as server:
            yield server.url


def opened(url: str, chunk: int) -> BlockingBroker:
    return open_blocking_broker(url, limits=replace(DEFAULT_LIMITS, script_entries=chunk, script_bytes=3000))


def write(url: str, values: list[bytes], *, chunk: int, bulk: bool, epoch: int = 1) -> tuple[int, int]:
    kind = BulkOnce if bulk else Once
    once = kind("out", "w", epoch, digest=Digest())
    added = skipped = 0
    with opened(url, chunk) as broker:
        for first in range(0, len(values), 130):
            part = UniformRows([b"event"], [pa.array(values[first : first + 130], pa.binary())])
            if isinstance(once, BulkOnce):
                new_added, new_skipped = broker.run(once.append_uniform, part)
            else:
                appended = broker.run(once.append_rows, list(part))
                new_added, new_skipped = appended.added, appended.skipped
            added, skipped = added + new_added, skipped + new_skipped
        broker.run(once.finish)
    return added, skipped


def stored(url: str) -> list[bytes]:
    with open_blocking_broker(url) as broker:
        return [entry.fields[b"event"] for entry in broker.xrange("out")]


@pytest.mark.parametrize("seed", range(5))
def test_replays_by_either_way_add_what_is_missing_and_nothing_else(url: str, seed: int):
    rng = random.Random(seed)
    stored_count = 0
    for bulk in (rng.random() < 0.5, True, False, True):
        count = 500 if stored_count == 500 else rng.randrange(stored_count, 501)
        if count < stored_count:
            continue
        added, skipped = write(url, VALUES[:count], chunk=rng.choice([1, 7, 90, 1000]), bulk=bulk)
        assert (added, skipped) == (count - stored_count, stored_count)
        stored_count = count
        assert stored(url) == VALUES[:stored_count]


def test_other_rows_fewer_rows_and_older_versions_are_refused(url: str):
    write(url, VALUES, chunk=100, bulk=True, epoch=5)
    different_rows = [*VALUES[:250], b"other", *VALUES[251:]]
    for bulk in (True, False):
        with pytest.raises(NonDeterministicReplay):
            write(url, different_rows, chunk=60, bulk=bulk, epoch=5)
        with pytest.raises(NonDeterministicReplay):
            write(url, VALUES[:400], chunk=60, bulk=bulk, epoch=5)
        with pytest.raises(StaleWriter):
            write(url, VALUES, chunk=60, bulk=bulk, epoch=4)
    assert stored(url) == VALUES
    assert write(url, VALUES[:3], chunk=60, bulk=True, epoch=6) == (3, 0)
