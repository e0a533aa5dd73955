"""Several targets of one write: parsing of their options, and distribution of batches."""

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


def test_further_target_inherits_options_of_the_first() -> None:
    further = {"also.Audit.url": "redis://b", "also.Audit.stream": "audit", "also.audit.2.chunkRows": "10"}
    first, audit, second = sink_targets({**FIRST, **further}, streaming=False)
    assert (first.address.url, first.stream, first.sink_id) == ("redis://a", "orders", "sink")
    assert (audit.address.url, audit.stream, audit.sink_id, audit.trim) == ("redis://b", "audit", "Audit", first.trim)
    assert (second.stream, second.sink_id, second.chunk_rows) == ("orders", "audit.2", 10)
    assert {target.txn_version for target in (first, audit, second)} == {3}


def test_one_target_is_the_default() -> None:
    assert [target.stream for target in sink_targets(FIRST, streaming=False)] == ["orders"]


@pytest.mark.parametrize(
    ("options", "named"),
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
def test_invalid_option_of_a_target_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        sink_targets({**FIRST, **options}, streaming=False)
    assert refused.value.option == named


def test_invalid_address_of_a_target_is_shown_without_its_password() -> None:
    with pytest.raises(InvalidOption) as refused:
        sink_targets({**FIRST, "also.b.url": "http://user:s3cret@b"}, streaming=False)
    assert "s3cret" not in f"{refused.value!r} {refused.value} {vars(refused.value)}"


class FakeTarget:
    """A WriteTarget that records its values and threads, and fails at a given batch."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.options = SimpleNamespace(sink_id=name)
        self.values: list[int] = []
        self.threads: set[int] = set()
        self._fails_at = fails_at

    def take(self, batch: pa.RecordBatch) -> None:
        self.threads.add(threading.get_ident())
        if len(self.values) == self._fails_at:
            raise ConnectionError(f"{self.options.sink_id} is gone")
        self.values += batch.column(0).to_pylist()


def batches(count: int) -> Any:
    return (pa.RecordBatch.from_arrays([pa.array([number])], names=["n"]) for number in range(count))


def test_each_target_receives_every_batch_in_order_in_its_own_thread() -> None:
    targets: Any = [FakeTarget("a"), FakeTarget("b"), FakeTarget("c")]
    fan_out(batches(50), targets)
    assert [target.values for target in targets] == [list(range(50))] * 3
    assert len(set.union(*(target.threads for target in targets))) == 3


def test_one_target_uses_no_thread() -> None:
    target: Any = FakeTarget("a")
    fan_out(batches(5), [target])
    assert target.threads == {threading.get_ident()}


def test_failed_target_does_not_stop_the_others() -> None:
    targets: Any = [FakeTarget("a"), FakeTarget("b", fails_at=3), FakeTarget("c")]
    with pytest.raises(ConnectionError, match="b is gone") as raised:
        fan_out(batches(50), targets)
    assert [len(target.values) for target in targets] == [50, 3, 50]
    assert "'b'" in raised.value.__notes__[0]


def test_error_of_the_input_ends_the_threads_and_is_raised() -> None:
    def breaking() -> Any:
        yield from batches(3)
        raise ValueError("input failed")

    targets: Any = [FakeTarget("a"), FakeTarget("b")]
    with pytest.raises(ValueError, match="input failed"):
        fan_out(breaking(), targets)
    assert not [thread for thread in threading.enumerate() if thread.name in ("millstream-a", "millstream-b")]
