"""A publish takes few hops, and so does a batch of rows, however many: a layer that only hands on is removed.

``scripts/count_hops.py`` says what a hop is, and prints them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing import RedisProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from count_hops import batch_hops, hops


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with RedisProcess() as server:
        yield server.url


def test_a_publish_in_this_process_takes_eighteen_hops_at_most() -> None:
    found = asyncio.run(hops("local://"))

    assert found[0][1] == "Publisher.publish"
    assert found[-1][1] == "Engine.execute"
    assert len(found) <= 18, found


def test_a_publish_to_redis_takes_twenty_eight_hops_at_most(url: str) -> None:
    found = asyncio.run(hops(url))

    assert found[0][1] == "Publisher.publish"
    assert found[-1][1] == "AsyncConnection.exchange"
    assert len(found) <= 28, found


def test_a_batch_of_rows_takes_the_same_hops_however_many_rows_it_has(url: str) -> None:
    """From a stream into a batch, and from a batch to where the wire sends it, exactly once."""
    few, many = batch_hops(url, rows=100), batch_hops(url, rows=400)

    assert few == many
    reading, writing = few
    assert reading[0][1] == "_Reading.read"
    assert writing[-1][1] == "BlockingConnection.exchange"
    assert len(reading) <= 32, reading
    assert len(writing) <= 78, writing
