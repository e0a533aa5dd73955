"""Mapping of rows to entries: the schema decides which columns become fields, marks and streams."""

import pyarrow as pa
import pytest

from millstream.broker.scripts.append_once import Digest
from millstream.errors import PayloadTooLarge
from millstream.spark.bulk import UniformRows
from millstream.spark.delivery import WriteIdentity, streaming_identity
from millstream.spark.entries import check_sizes, mapping_for, pieces
from millstream.spark.errors import InvalidOption, NoWriteIdentity, UnusableRow
from millstream.spark.sink_options import sink_options
from millstream.wire.resp import pack


def write(table: dict[str, pa.Array], **options: str) -> list[tuple[str, list[list[bytes]], list[bytes] | None]]:
    batch = pa.RecordBatch.from_arrays(list(table.values()), names=list(table))
    mapping = mapping_for(batch.schema, sink_options({"url": "redis://h", **options}, streaming=False))
    return [(piece.stream, list(piece.rows), piece.marks) for piece in pieces(mapping, batch)]


def texts(*cells: str | None) -> pa.Array:
    return pa.array(cells, pa.string())


def binary(*cells: bytes) -> pa.Array:
    return pa.array(cells, pa.binary())


def maps(*cells: dict[str, str | None] | None) -> pa.Array:
    return pa.array([None if c is None else list(c.items()) for c in cells], pa.map_(pa.string(), pa.string()))


def test_value_column_becomes_one_field():
    assert write({"value": texts("a", "ä")}, stream="out") == [
        ("out", [[b"event", b"a"], [b"event", "ä".encode()]], None)
    ]
    ((_, rows, _),) = write({"value": pa.array([b"\x00\xff"])}, stream="out", valueField="body")
    assert rows == [[b"body", b"\x00\xff"]]


def test_map_column_has_priority_over_value_unless_content_is_set():
    table = {"value": texts("v"), "fields": maps({"a": "1", "b": "2"})}
    assert write(table, stream="out")[0][1] == [[b"a", b"1", b"b", b"2"]]
    assert write(table, stream="out", content="value")[0][1] == [[b"event", b"v"]]


def test_map_columns_and_slices_of_them_become_fields():
    column = maps({"a": "1"}, {"a": "2"}, {"a": "3"}, {"b": "4", "c": None, "d": "5"})
    assert write({"fields": column[:3]}, stream="o")[0][1] == [[b"a", b"1"], [b"a", b"2"], [b"a", b"3"]]
    assert write({"fields": column[1:]}, stream="o")[0][1] == [[b"a", b"2"], [b"a", b"3"], [b"b", b"4", b"d", b"5"]]
    assert write({"fields": maps({"a": "1"}, {"b": "2"})}, stream="o")[0][1] == [[b"a", b"1"], [b"b", b"2"]]
    assert write({"fields": maps({}, {"b": "2", "c": "3"})[1:]}, stream="o")[0][1] == [[b"b", b"2", b"c", b"3"]]


def test_columns_become_fields_and_null_is_omitted():
    table = {"n": pa.array([1, None]), "name": texts("x", "y"), "ok": pa.array([True, False])}
    assert write(table, stream="out")[0][1] == [
        [b"n", b"1", b"name", b"x", b"ok", b"true"],
        [b"name", b"y", b"ok", b"false"],
    ]


def test_stream_option_overrides_the_stream_column():
    table = {"stream": texts("b", "a", "b"), "value": texts("1", "2", "3")}
    assert write(table) == [("b", [[b"event", b"1"], [b"event", b"3"]], None), ("a", [[b"event", b"2"]], None)]
    assert [stream for stream, _, _ in write(table, stream="out")] == ["out"]
    assert write({"stream": texts("s"), "n": pa.array([1])}) == [("s", [[b"n", b"1"]], None)]


def test_stream_column_may_contain_invalid_utf8():
    names = pa.array([b"caf\xe9", b"plain", b"caf\xe9"], pa.binary())
    batch = pa.record_batch({"stream": names, "value": ["1", "2", "3"]})
    mapping = mapping_for(batch.schema, sink_options({"url": "redis://h"}, streaming=True))
    assert [(piece.stream, len(piece.rows)) for piece in pieces(mapping, batch)] == [("caf\udce9", 2), ("plain", 1)]


def test_stream_template_is_filled_from_columns():
    table = {"region": texts("eu", "us"), "n": pa.array([1, 2]), "value": texts("a", "b")}
    assert [stream for stream, _, _ in write(table, stream="{orders}.${region}.${n}")] == [
        "{orders}.eu.1",
        "{orders}.us.2",
    ]


@pytest.mark.parametrize(
    ("table", "options", "named"),
    [
        ({"value": texts("a")}, {}, "stream"),
        ({"other": texts("a")}, {"stream": "o", "content": "value"}, "value"),
        ({"value": pa.array([1])}, {"stream": "o"}, "value"),
        ({"value": texts("a")}, {"stream": "o.${region}"}, "region"),
        ({"value": texts("a")}, {"stream": "o", "content": "fields"}, "fields"),
        ({"value": texts("a")}, {"stream": "o", "idColumn": "id"}, "id"),
        ({"x": pa.array([[1]])}, {"stream": "o"}, "to_json"),
        ({"stream": texts("a")}, {}, "column"),
    ],
)
def test_schema_that_cannot_be_written_is_rejected(table, options, named: str):
    with pytest.raises(InvalidOption, match=named):
        write(table, **options)


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ({"value": texts(None)}, {"stream": "o"}),
        ({"fields": maps(None)}, {"stream": "o"}),
        ({"fields": maps({"a": None})}, {"stream": "o"}),
        ({"fields": maps({})}, {"stream": "o"}),
        ({"a": texts(None), "b": texts(None)}, {"stream": "o"}),
        ({"stream": texts(None), "value": texts("a")}, {}),
        ({"value": texts("a"), "e": texts(None)}, {"stream": "o", "idColumn": "e"}),
    ],
)
def test_row_that_cannot_become_an_entry_is_an_error(table, options):
    with pytest.raises(UnusableRow):
        write(table, **options)


def test_marks_stay_with_their_rows():
    table = {"value": texts("1", "2"), "e": texts("x", "y")}
    options = {"stream": "o", "delivery": "exactly_once_by_event_id", "eventIdColumn": "e"}
    assert write(table, **options) == [("o", [[b"event", b"1"], [b"event", b"2"]], [b"x", b"y"])]


@pytest.mark.parametrize("values", [[], [b""], [b"a", b"\r\n$1\r\n", b"x" * 1000], [b"ab"] * 50])
@pytest.mark.parametrize("names", [[b"event"], [b"event", b"id", b"headers"]])
def test_uniform_rows_pack_the_same_bytes(values: list[bytes], names: list[bytes]):
    columns = [binary(*column) for column in (values, values[::-1], values)]
    rows = UniformRows(names, columns[: len(names)])
    listed = [rows[at] for at in range(len(rows))]
    assert list(rows) == listed
    flat = tuple(value for row in listed for value in row[1::2])
    assert b"*%d\r\n%b" % (len(flat), rows.packed_values()) == pack(flat)
    unpacked = UniformRows(names, columns[: len(names)])
    for part in (unpacked[:1], unpacked[1:], rows[1:], rows[1:2][:5]):
        assert part.packed_values() == b"".join(pack(tuple(row[1::2]))[4:] for row in part)
    assert list(rows.take([at for at in range(len(rows)) if at % 2])) == listed[1::2]


@pytest.mark.parametrize("cut", range(5))
def test_digest_does_not_depend_on_chunks_or_packing(cut: int):
    few, many = UniformRows([b"a"], [binary(b"1", b"2")]), UniformRows([b"a", b"b"], [binary(b"1"), binary(b"2")])
    rows = [*few, *many, *few]
    whole, parts, packed = Digest(), Digest(), Digest()
    whole.add(rows)
    parts.add(rows[:cut])
    parts.add(rows[cut:])
    for piece in (few[:1], few[1:], many, few):
        packed.add_packed(piece.names, piece.packed_values())
    assert whole.hexdigest() == parts.hexdigest() == packed.hexdigest()


def test_digest_distinguishes_names_values_and_row_boundaries():
    digests = set()
    alike = ([[b"a", b"1"]], [[b"1", b"a"]], [[b"a", b"1", b"b", b"2"]], [[b"a", b"1"], [b"b", b"2"]], [[b"a", b""]])
    for rows in ([], *alike, [[b"a", b"1"], [b"a", b"2"]], [[b"a", b"1$1\r\n2\r\n"]]):
        digest = Digest()
        digest.add(rows)
        digests.add(digest.hexdigest())
    assert len(digests) == len(alike) + 3


def test_streaming_write_without_ids_is_an_error():
    assert streaming_identity("q", "7", "sink", 3) == WriteIdentity("q", 7, "sink", 3)
    for query, batch in ((None, "1"), ("q", None), ("", "")):
        with pytest.raises(NoWriteIdentity, match="txnAppId"):
            streaming_identity(query, batch, "sink", 0)


@pytest.mark.parametrize(
    ("table", "size"),
    [
        ({"value": binary(b"x", b"y" * 90)}, 95),
        ({"a": binary(b"x" * 2000, b""), "b": binary(b"", b"y" * 3000)}, 3002),
        ({"a": texts("x" * 90, None), "b": texts(None, "y")}, 91),
        ({"fields": maps({"a": "x" * 50, "b": "y" * 50}, {"c": "z"})}, 102),
    ],
)
def test_row_above_the_entry_limit_is_rejected_before_any_is_written(table, size: int):
    batch = pa.RecordBatch.from_pydict(table)
    [piece] = pieces(
        mapping_for(batch.schema, sink_options({"url": "redis://h", "stream": "s"}, streaming=False)), batch
    )
    check_sizes(piece, size)
    with pytest.raises(PayloadTooLarge) as refused:
        check_sizes(piece, size - 1)
    assert (refused.value.size, refused.value.limit) == (size, size - 1)
