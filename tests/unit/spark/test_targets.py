"""Several places for one write: how their options are read, and how batches are given to all of them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millstream.spark.errors import InvalidOption
from millstream.spark.fan_out import fan_out
from millstream.spark.sink_options import sink_targets

FIRST = {"url": "redis://a", "stream": "orders", "maxlen": "100", "txnAppId": "app", "txnVersion": "3"}


def test_a_further_place_is_as_the_first_but_for_what_is_said_of_it() -> None:
    further = {"also.Audit.url": "redis://b", "also.Audit.stream": "audit", "also.audit.2.chunkRows": "10"}
    first, audit, second = sink_targets({**FIRST, **further}, streaming=False)
    assert (first.address.url, first.stream, first.sink_id) == ("redis://a", "orders", "sink")
    assert (audit.address.url, audit.stream, audit.sink_id, audit.trim) == ("redis://b", "audit", "Audit", first.trim)
    assert (second.stream, second.sink_id, second.chunk_rows) == ("orders", "audit.2", 10)
    assert {one.txn_version for one in (first, audit, second)} == {3}


def test_one_place_is_the_rule() -> None:
    assert [one.stream for one in sink_targets(FIRST, streaming=False)] == ["orders"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"also.url": "redis://b"}, "also.url"),
        ({"also.b.content": "value"}, "also.b.content"),
        ({"also.b.nothing": "1"}, "also.b.nothing"),
        ({"also.b.chunkRows": "none"}, "also.b.chunkRows"),
        ({"also.b.url": "http://b"}, "also.b.url"),
        ({"also.b.sinkId": "sink"}, "sinkId"),
        ({"also.b.stream": "x", "also.c.sinkId": "b"}, "sinkId"),
    ],
)
def test_a_wrong_option_of_a_place_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        sink_targets({**FIRST, **given}, streaming=False)
    assert refused.value.option == named


def test_a_wrong_address_of_a_place_is_shown_without_its_password() -> None:
    with pytest.raises(InvalidOption) as refused:
        sink_targets({**FIRST, "also.b.url": "http://user:s3cret@b"}, streaming=False)
    assert "s3cret" not in f"{refused.value!r} {refused.value} {vars(refused.value)}"


class Place:
    """Stands for a WriteTarget: remembers what it got, and in which thread; fails when it is told to."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.options = SimpleNamespace(sink_id=name)
        self.got: list[int] = []
        self.threads: set[int] = set()
        self._fails_at = fails_at

    def take(self, batch: pa.RecordBatch) -> None:
        self.threads.add(threading.get_ident())
        if len(self.got) == self._fails_at:
            raise ConnectionError(f"{self.options.sink_id} is gone")
        self.got += batch.column(0).to_pylist()


def batches(count: int) -> Any:
    return (pa.RecordBatch.from_arrays([pa.array([number])], names=["n"]) for number in range(count))


def test_every_place_gets_every_batch_in_order_and_in_a_thread_of_its_own() -> None:
    places: Any = [Place("a"), Place("b"), Place("c")]
    fan_out(batches(50), places)
    assert [place.got for place in places] == [list(range(50))] * 3
    assert len(set.union(*(place.threads for place in places))) == 3


def test_one_place_needs_no_thread() -> None:
    place: Any = Place("a")
    fan_out(batches(5), [place])
    assert place.threads == {threading.get_ident()}


def test_a_place_that_fails_does_not_keep_the_others_from_their_rows() -> None:
    places: Any = [Place("a"), Place("b", fails_at=3), Place("c")]
    with pytest.raises(ConnectionError, match="b is gone") as raised:
        fan_out(batches(50), places)
    assert [len(place.got) for place in places] == [50, 3, 50]
    assert "'b'" in raised.value.__notes__[0]


def test_rows_that_stop_coming_end_the_threads_and_are_the_error() -> None:
    def breaking() -> Any:
        yield from batches(3)
        raise ValueError("the rows broke")

    places: Any = [Place("a"), Place("b")]
    with pytest.raises(ValueError, match="the rows broke"):
        fan_out(breaking(), places)
    assert not [thread for thread in threading.enumerate() if thread.name in ("millstream-a", "millstream-b")]
