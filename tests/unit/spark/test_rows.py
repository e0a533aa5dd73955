"""Raw entries into Arrow columns."""

import pyarrow as pa
import pytest

from millstream.spark.errors import InvalidOption, MalformedEntry
from millstream.spark.rows import OVERSIZE_FIELD, bounded_pages, default_batches, typed_batches

DEFAULT = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("id", pa.string()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("value", pa.binary()),
        pa.field("fields", pa.map_(pa.string(), pa.field("value", pa.binary()))),
    ]
)


def rows(page: list, value_field: str = "event") -> list[dict]:
    return default_batches(DEFAULT, value_field)([("orders", page)]).to_pylist()


def typed(page: list, mode: str = "PERMISSIVE", **columns: pa.DataType) -> list[dict]:
    schema = pa.schema([pa.field(name, kind) for name, kind in columns.items()])
    return typed_batches(schema, mode, "_corrupt_record")([("orders", page)]).to_pylist()


def test_one_field_entries():
    got = rows([[b"1000-0", [b"event", b"\x00\xff"]], [b"2000-5", [b"event", b"b"]]])
    assert [(r["stream"], r["id"], r["timestamp"].timestamp(), r["value"]) for r in got] == [
        ("orders", "1000-0", 1.0, b"\x00\xff"),
        ("orders", "2000-5", 2.0, b"b"),
    ]
    assert got[0]["fields"] == [("event", b"\x00\xff")]


def test_entries_of_different_shapes():
    got = rows([[b"1-0", [b"a", b"1", b"event", b"x"]], [b"2-0", [b"b", b"2"]], [b"3-0", [b"event", b"y", b"c", b"3"]]])
    assert [r["value"] for r in got] == [b"x", None, b"y"]
    assert [r["fields"] for r in got] == [[("a", b"1"), ("event", b"x")], [("b", b"2")], [("event", b"y"), ("c", b"3")]]


def test_field_with_another_name_is_not_the_value():
    assert [r["value"] for r in rows([[b"1-0", [b"payload", b"1"]]])] == [None]
    assert [r["value"] for r in rows([[b"1-0", [b"payload", b"1"]]], "payload")] == [b"1"]


def test_entry_without_fields_next_to_an_entry_with_two():
    got = rows([[b"1-0", [b"event", b"x"]], [b"2-0", [b"event", b"y"]], [b"3-0", [b"a", b"1", b"event", b"z"]]])
    assert [r["value"] for r in got] == [b"x", b"y", b"z"]


def test_last_value_of_a_repeated_field_is_used():
    got = rows([[b"1-0", [b"event", b"old", b"event", b"new"]], [b"2-0", [b"event", b"a", b"event", b"b"]]])
    assert [r["value"] for r in got] == [b"new", b"b"]
    assert got[0]["fields"] == [("event", b"new")]
    mixed = rows([[b"1-0", [b"event", b"old", b"event", b"new"]], [b"2-0", [b"x", b"1"]]])
    assert mixed[0]["fields"] == [("event", b"new")]


def test_invalid_utf8_names_and_ids_beyond_timestamps_are_read():
    got = rows([[b"18446744073709551615-1", [b"\xff", b"1", b"\xfe", b"2"]]])
    assert got[0]["timestamp"] is None
    assert got[0]["id"] == "18446744073709551615-1"
    assert got[0]["fields"] == [("\\xff", b"1"), ("\\xfe", b"2")]
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    (row,) = default_batches(DEFAULT, "event")([(odd, [[b"1-0", [b"event", b"x"]]])]).to_pylist()
    assert row["stream"] == "caf\\xe9"
    schema = pa.schema([pa.field("_stream", pa.string())])
    (row,) = typed_batches(schema, "PERMISSIVE", "c")([(odd, [[b"1-0", [b"event", b"x"]]])]).to_pylist()
    assert row["_stream"] == "caf\\xe9"


def test_timestamps_of_ids_with_different_lengths():
    ids = [b"5-1", b"123-0", b"1700000000123-7", b"1700000000123-18446744073709551615", b"17000000001234-0"]
    last = 9223372036854775
    page = [[entry_id, [b"event", b"x"]] for entry_id in ids]
    batch = default_batches(DEFAULT, "event")([("a", page[:2]), ("b", page[2:])])
    milliseconds = [int(entry_id.partition(b"-")[0]) for entry_id in ids]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [ms * 1000 for ms in milliseconds]
    assert batch.column("stream").to_pylist() == ["a", "a", "b", "b", "b"]
    for others in ([], [[b"%d-0" % (last + 1), [b"event", b"x"]]]):
        limit = default_batches(DEFAULT, "event")([("a", [[b"%d-0" % last, [b"event", b"x"]], *others])])
        assert limit.column("timestamp").cast(pa.int64()).to_pylist() == [last * 1000, *(None for _ in others)]


def test_schema_maps_fields_by_name_and_casts():
    page = [[b"5-1", [b"n", b" 42", b"price", b"1.25", b"ok", b"true", b"day", b"2024-02-03"]], [b"6-0", [b"n", b"7"]]]
    got = typed(
        page, _id=pa.string(), n=pa.int32(), price=pa.decimal128(10, 2), ok=pa.bool_(), day=pa.date32(), no=pa.string()
    )
    assert got[0]["_id"] == "5-1"
    assert (got[0]["n"], str(got[0]["price"]), got[0]["ok"], str(got[0]["day"])) == (42, "1.25", True, "2024-02-03")
    assert (got[1]["n"], got[1]["price"], got[1]["no"]) == (7, None, None)


BAD = [[b"1-0", [b"n", b"1"]], [b"2-0", [b"n", b"x"]], [b"3-0", [b"n", b"3"]]]


def test_failed_cast_is_null_with_a_corrupt_record():
    got = typed(BAD, n=pa.int64(), _corrupt_record=pa.string())
    assert [r["n"] for r in got] == [1, None, 3]
    assert [r["_corrupt_record"] for r in got] == [None, '{"n": "x"}', None]


def test_failed_cast_is_dropped_or_an_error_by_mode():
    assert [r["n"] for r in typed(BAD, "DROPMALFORMED", n=pa.int64())] == [1, 3]
    with pytest.raises(MalformedEntry, match="2-0"):
        typed(BAD, "FAILFAST", n=pa.int64())


def test_timestamps_are_read_with_and_without_zone_and_as_milliseconds():
    page = [
        [b"1-0", [b"t", b"2024-01-01T00:00:00Z"]],
        [b"2-0", [b"t", b"2024-01-01 02:00:00+02:00"]],
        [b"3-0", [b"t", b"1704067200000"]],
        [b"4-0", [b"t", b"2024-01-01"]],
    ]
    got = {str(r["t"]) for r in typed(page, t=pa.timestamp("us", tz="UTC"))}
    assert got == {"2024-01-01 00:00:00+00:00"}


def test_nested_column_is_rejected_with_advice():
    with pytest.raises(InvalidOption, match="from_json"):
        typed([], n=pa.list_(pa.int32()))
    with pytest.raises(InvalidOption, match="STRING"):
        typed([], _corrupt_record=pa.int32())


def test_entry_above_the_limit_keeps_its_id_and_has_its_size() -> None:
    page = [[b"1-0", [b"event", b"x"]], [b"2-0", [b"event", b"x" * 90]], [b"3-0", [b"event", b"y"]]]
    [part] = bounded_pages(page, 80)
    assert rows(list(part)) == rows([page[0], [b"2-0", [OVERSIZE_FIELD, b"95"]], page[2]])
    assert list(bounded_pages(page, None)) == [page]


def test_large_entries_are_split_into_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.spark.rows.MAX_BATCH_BYTES", 100)
    page = [[b"%d-0" % number, [b"event", b"x" * 45]] for number in range(1, 6)]
    assert [len(part) for part in bounded_pages(page, None)] == [2, 2, 1]
    assert [len(part) for part in bounded_pages([[b"1-0", [b"event", b"x" * 200]], page[0]], None)] == [1, 1]
