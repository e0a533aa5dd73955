"""Measuring of batches, and adding up of reports."""

import pyarrow as pa
import pytest

from millstream.spark.entries import mapping_for
from millstream.spark.errors import InvalidOption
from millstream.spark.fan_out import Meter
from millstream.spark.sink_options import Delivered, read_report, sink_options, total, write_report


def measured(table: dict[str, pa.Array], **given: str) -> list[Delivered]:
    batch = pa.RecordBatch.from_arrays(list(table.values()), names=list(table))
    options = sink_options({"url": "redis://h", "stream": "s", "report": "r", **given}, streaming=False)
    parts_measured: list[Delivered] = []
    meter = Meter(batch.schema, mapping_for(batch.schema, options), options.time_column)
    parts = [batch.slice(0, 1), batch.slice(1)]
    assert list(meter.over(parts, parts_measured)) == parts
    return parts_measured


def test_meter_counts_rows_bytes_and_times():
    table = {"event": pa.array(["ä", "b", None]), "at": pa.array([5, None, 3], pa.int64())}
    assert measured(table, timeColumn="at") == [Delivered(1, 2, 5, 5), Delivered(2, 1, 3, 3)]


def test_bytes_are_counted_of_the_value_column():
    assert measured({"value": pa.array([b"abc", b"d"]), "event": pa.array(["not written", ""])})[0].bytes == 3
    assert measured({"body": pa.array(["ab", "c"])}, valueField="body")[0].bytes == 2
    assert measured({"event": pa.array([1, 2])})[0].bytes == 0, "a number has no text yet"
    assert measured({"other": pa.array(["ab", "c"])})[0].bytes == 0


def test_reports_are_added_up_without_times(tmp_path):
    parts = [Delivered(2, 10, 5, 9), Delivered(), Delivered(1, 1, None, None), Delivered(3, 0, 7, 11)]
    assert total(parts) == Delivered(6, 11, 5, 11)
    assert total([]) == Delivered(0, 0, None, None)
    write_report(str(tmp_path / "report"), parts)
    assert read_report(str(tmp_path / "report")) == Delivered(6, 11, 5, 11)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("column", ["nowhere", "event"])
def test_time_column_that_is_not_an_integer_is_rejected(column: str):
    with pytest.raises(InvalidOption) as caught:
        measured({"event": pa.array(["a", "b"]), "k": pa.array(["c", "d"])}, timeColumn=column)
    assert caught.value.option == "timeColumn"


def test_streaming_write_rejects_a_report():
    with pytest.raises(InvalidOption, match="report"):
        sink_options({"url": "redis://h", "report": "r"}, streaming=True)


def test_added_and_skipped_are_sums_and_kept_for_each_target():
    places = {"a": {"added": 2, "skipped": 0, "dropped": 0}, "b": {"added": 0, "skipped": 2, "dropped": 1}}
    part = Delivered(2, 9, dropped=1, added=2, skipped=2, places=places)
    both = total([part, part])
    assert (both.rows, both.added, both.skipped, both.dropped) == (4, 4, 4, 2)
    assert both.of("b").numbers() == {"rows": 4, "bytes": 18, "dropped": 2, "added": 0, "skipped": 4}
    assert Delivered(2, 9).numbers() == {"rows": 2, "bytes": 9, "dropped": 0}
