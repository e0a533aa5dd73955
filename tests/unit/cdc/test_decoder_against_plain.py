"""The numpy decoder equals a simple decoder for random rows."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_decoder import decode_plainly

from millstream.cdc.decoding import Decoding
from millstream.cdc.postgres.decode import decode_changes
from millstream.cdc.postgres.pgoutput import Column, Relation
from millstream.cdc.segments import read_segment, write_segment

PEOPLE = Relation(
    7,
    "public",
    "people",
    "f",
    (
        Column("id", 23, True, "number"),
        Column('na"me', 25, False, "text"),
        Column("size", 701, False, "float"),
        Column("grün", 16, False, "boolean"),
        Column("born", 1082, False, "plain"),
    ),
)
PAIRS = Relation(9, "other", "pairs", "d", (Column("a", 25, True, "text"), Column("b", 23, True, "number")))

number = st.integers(0, 9).map(str)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.sampled_from(
    ['"', "\\", "\n\r\t\b\f", "\x01\x1f\x7f", "", "ünï", "\\u0041", "null"]
)
absent = st.sampled_from([None, b"u"])
person = st.tuples(
    number,
    text | absent,
    st.sampled_from(["1.5", "-0", "1e+20", "NaN", "Infinity", "-Infinity"]) | absent,
    st.sampled_from("tf") | absent,
    st.just("2024-01-31") | absent,
)
pair = st.tuples(text, number)


def as_tuple(values: tuple) -> bytes:
    made = struct.pack(">H", len(values))
    for value in values:
        if isinstance(value, str):
            made += b"t" + struct.pack(">I", len(value.encode())) + value.encode()
        else:
            made += b"n" if value is None else value
    return made


@st.composite
def change(draw: st.DrawFn) -> bytes:
    relation, row = draw(st.sampled_from([(PEOPLE, person), (PAIRS, pair)]))
    head = struct.pack(">I", relation.id)
    kind = draw(st.sampled_from("iuuuudt"))
    if kind == "i":
        return b"I" + head + b"N" + as_tuple(draw(row))
    if kind == "t":
        return b"T" + struct.pack(">IBII", 2, 0, 9, 7)

    def old() -> bytes:
        if draw(st.booleans()):
            return b"O" + as_tuple(tuple(None if value == b"u" else value for value in draw(row)))
        columns = zip(relation.columns, draw(row), strict=True)
        return b"K" + as_tuple(tuple(value if column.key else None for column, value in columns))

    if kind == "d":
        return b"D" + head + old()
    return b"U" + head + (old() if draw(st.booleans()) else b"") + b"N" + as_tuple(draw(row))


@st.composite
def log(draw: st.DrawFn) -> list[bytes]:
    messages, lsn = [], 100
    for xid, changes in enumerate(draw(st.lists(st.lists(change(), max_size=6), max_size=5)), start=1):
        messages.append(b"B" + struct.pack(">QqI", lsn, xid * 1_234_567, xid))
        messages += changes
        messages.append(b"C" + struct.pack(">BQQq", 0, lsn, lsn + 10, 0))
        lsn += 10
    return messages


@pytest.mark.timeout(600)  # so many examples take long on a machine that is busy with other things
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=log(), partitions=st.integers(1, 3))
def test_column_decoder_equals_row_decoder(messages: list[bytes], partitions: int, tmp_path: Path) -> None:
    relations = {7: PEOPLE, 9: PAIRS}
    metadata = {"relations": {str(number): relation.to_json() for number, relation in relations.items()}}
    path = tmp_path / "log.seg"
    path.unlink(missing_ok=True)
    write_segment(path, b"".join(messages), array("I", map(len, messages)), metadata)
    plain = decode_plainly(messages, relations, "s")
    assert decode_changes(read_segment(path), Decoding("s", "db")).to_pylist() == plain
    by_lane = [
        decode_changes(read_segment(path), Decoding("s", "db", partition=partition, partitions=partitions)).to_pylist()
        for partition in range(partitions)
    ]
    assert sorted((e for partition in by_lane for e in partition), key=lambda e: e["id"]) == sorted(
        plain, key=lambda e: e["id"]
    )
    for partition in by_lane:
        for event in partition:
            for side in ("before", "after"):
                assert event[side] is None or json.loads(event[side]) is not None
    keys = [{(event["table"], event["key"]) for event in partition if event["key"]} for partition in by_lane]
    assert len(set().union(*keys)) == sum(map(len, keys)), "all changes of a key are in one partition"
