"""What a write is measured to be, batch by batch, and how the parts add up."""

import pyarrow as pa
import pytest

from millstream.spark.entries import mapping_for
from millstream.spark.errors import InvalidOption
from millstream.spark.fan_out import Meter
from millstream.spark.sink_options import Delivered, read_report, sink_options, total, write_report


def measured(table: dict[str, pa.Array], **given: str) -> list[Delivered]:
    batch = pa.RecordBatch.from_arrays(list(table.values()), names=list(table))
    options = sink_options({"url": "redis://h", "stream": "s", "report": "r", **given}, streaming=False)
    seen: list[Delivered] = []
    meter = Meter(batch.schema, mapping_for(batch.schema, options), options.time_column)
    parts = [batch.slice(0, 1), batch.slice(1)]
    assert list(meter.over(parts, seen)) == parts
    return seen


def test_rows_bytes_and_times_of_each_batch():
    table = {"event": pa.array(["ä", "b", None]), "at": pa.array([5, None, 3], pa.int64())}
    assert measured(table, timeColumn="at") == [Delivered(1, 2, 5, 5), Delivered(2, 1, 3, 3)]


def test_bytes_are_those_of_the_value_wherever_it_comes_from():
    assert measured({"value": pa.array([b"abc", b"d"]), "event": pa.array(["not written", ""])})[0].bytes == 3
    assert measured({"body": pa.array(["ab", "c"])}, valueField="body")[0].bytes == 2
    assert measured({"event": pa.array([1, 2])})[0].bytes == 0, "a number has no text yet"
    assert measured({"other": pa.array(["ab", "c"])})[0].bytes == 0


def test_parts_add_up_and_times_may_be_absent(tmp_path):
    parts = [Delivered(2, 10, 5, 9), Delivered(), Delivered(1, 1, None, None), Delivered(3, 0, 7, 11)]
    assert total(parts) == Delivered(6, 11, 5, 11)
    assert total([]) == Delivered(0, 0, None, None)
    write_report(str(tmp_path / "report"), parts)
    assert read_report(str(tmp_path / "report")) == Delivered(6, 11, 5, 11)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("column", ["nowhere", "event"])
def test_a_time_column_that_is_none_is_refused(column: str):
    with pytest.raises(InvalidOption) as caught:
        measured({"event": pa.array(["a", "b"]), "k": pa.array(["c", "d"])}, timeColumn=column)
    assert caught.value.option == "timeColumn"


def test_a_streaming_write_reports_nothing():
    with pytest.raises(InvalidOption, match="report"):
        sink_options({"url": "redis://h", "report": "r"}, streaming=True)
