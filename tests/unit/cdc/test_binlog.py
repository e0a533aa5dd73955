"""Parsing and decoding of literal binlog events, as MariaDB 10.11 wrote them."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.mariadb import decode
from millstream.cdc.mariadb.binlog import (
    BEGIN_FORM,
    Query,
    file_at,
    parse_gtid,
    parse_query,
    parse_rotate,
    parse_table_map,
    position_of,
)
from millstream.cdc.mariadb.decode import count_changes, decode_changes, gtid_before
from millstream.cdc.mariadb.rows import RowSlices
from millstream.cdc.read_ahead import ReadAheadLog
from millstream.cdc.segments import Bytes, Numbers, read_segment, write_segment

CHARSETS = {63: "binary", 45: "utf8mb4", 46: "utf8mb4", 8: "latin1"}
# CREATE TABLE t (id int unsigned primary key, g int as (id*2) virtual, gs int as (id*3) stored, u uuid, i4 inet4,
#   i6 inet6, b binary(16), c char(5), cl char(5) character set latin1, e enum('a','ü'), st set('x','y','z'),
#   bt bit(10), j json, ge geometry, d decimal(10,3), ti time(3), dt datetime(6), ts timestamp(2) null, y year,
#   f float, db1 double, tx text, inv int invisible default 7)
TABLE = (
    b"\x12\x00\x00\x00\x00\x00\x01\x00\x0bdb_144019a7\x00\x01t\x00\x17\x03\x03\x03\xfe\xfe\xfe\xfe\xfe\xfe\xfe\xfe\x10"
    b"\xfc\xff\xf6\x13\x12\x11\r\x04\x05\xfc\x03\x1c\xfe\x10\xfe\x04\xfe\x10\xfe\x10\xfe\x14\xfe\x05\xf7\x01\xf8\x01"
    b"\x02\x01\x04\x04\n\x03\x03\x06\x02\x04\x08\x02\xfe\xff\x7f\x01\x01\x88\x02\t?\x04-\x05\x08\x06.\x08-\x07\x01\x00"
    b"\x04>\x02id\x01g\x02gs\x01u\x02i4\x02i6\x01b\x01c\x02cl\x01e\x02st\x02bt\x01j\x02ge\x01d\x02ti\x02dt\x02ts\x01y"
    b"\x01f\x03db1\x02tx\x03inv\n\x01-\x05\x07\x03\x01x\x01y\x01z\x06\x06\x02\x01a\x02\xc3\xbc\x08\x01\x00"
)
ROW = (
    b"\x00\x00\x80\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x0e\x12>Eg\xe8\x9b\x12\xd3\xa4VBfUD\x04\x01\x02\x03"
    b"\x04\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x01\x02\x03\x04\x02\x01\x02\x02ab\x01\xe9\x02\x05\x02"
    b'\x81\x07\x00\x00\x00{"a":1}\x19\x00\x00\x00\x00\x00\x00\x00\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\xf0?\x00'
    b"\x00\x00\x00\x00\x00\x00@\x7f\xff\xff\xf3\xfe\xa6\x7f7G\xe1.\x99\xb2\x86AF\x01\xe2@e\x92\x00\x80\x0c|\xcd\xcc"
    b"\xcc=\x9cu\x00\x88<\xe47~\x03\x00h\xc3\xa9\x07\x00\x00\x00"
)
HEAD = b"\x12\x00\x00\x00\x00\x00\x01\x00\x17\xff\xff\x7f"
INSERT = b"\x17" + HEAD + ROW
UPDATE = b"\x18" + HEAD + b"\xff\xff\x7f" + ROW + ROW.replace(b"\x00\x00\x80\x01", b"\x00\x00\x80\x02", 1)


def table() -> dict:
    columns = {"u": "uuid", "i4": "inet4", "i6": "inet6", "g": "generated", "gs": "generated"}
    return parse_table_map(memoryview(TABLE), CHARSETS).with_catalog(columns).to_json()


def begin(lsn: int, sequence: int) -> bytes:
    return BEGIN_FORM.pack(b"B", lsn, 1_700_000_000_000, 0, 1, sequence)


def test_table_map_has_names_signedness_charsets_labels_and_key() -> None:
    parsed = parse_table_map(memoryview(TABLE), CHARSETS)
    assert (parsed.id, parsed.full_name, parsed.key) == (18, "db_144019a7.t", (0,))
    columns = {column.name: column for column in parsed.columns}
    assert [name for name, column in columns.items() if column.unsigned] == ["id", "y"]
    assert {name: column.charset for name, column in columns.items() if column.charset not in (None, "binary")} == {
        "c": "utf8mb4",
        "cl": "latin1",
        "e": "utf8mb4",
        "st": "utf8mb4",
        "j": "utf8mb4",
        "tx": "utf8mb4",
    }
    assert (columns["e"].labels, columns["st"].labels) == (("a", "ü"), ("x", "y", "z"))


def test_table_map_without_names_or_with_unknown_type_is_refused() -> None:
    bare = TABLE[: TABLE.index(b"\x01\x01\x88")]
    with pytest.raises(UnreadableMessage, match=r"db_144019a7\.t was written without its columns' names"):
        parse_table_map(memoryview(bare), CHARSETS)
    odd = TABLE.replace(b"\x17\x03\x03\x03", b"\x17\x03\x8c\x03", 1)
    with pytest.raises(UnreadableMessage, match=r"column 2 of db_144019a7\.t is a COMPRESSED column"):
        parse_table_map(memoryview(odd), CHARSETS)
    with pytest.raises(UnreadableMessage, match="shorter than it says"):
        parse_table_map(memoryview(TABLE[:-20]), CHARSETS)


def decoded(path: Path, messages: list[bytes], **decoding: object) -> list[dict]:
    file = path / f"{len(list(path.iterdir()))}.seg"
    lengths = array("I", [len(message) for message in messages])
    write_segment(file, b"".join(messages), lengths, {"relations": {"18": table()}, "open": None})
    return decode_changes(read_segment(file), Decoding("s", **decoding)).to_pylist()


def test_row_event_is_decoded_exactly(tmp_path: Path) -> None:
    [event] = decoded(tmp_path, [begin(4_294_967_300, 7), INSERT])
    assert (event["id"], event["op"], event["key"]) == ("s:4294967300:0", "c", '{"id":1}')
    assert (event["db"], event["schema"], event["table"]) == ("db_144019a7", None, "t")
    assert event["position"] == {"lsn": 4_294_967_300, "transaction": "0-1-7", "order": 0}
    assert json.loads(event["after"]) == {
        "id": 1,
        "u": "123e4567-e89b-12d3-a456-426655440000",
        "i4": "1.2.3.4",
        "i6": "::ffff:1.2.3.4",
        "b": "0x0102" + "00" * 14,
        "c": "ab",
        "cl": "é",
        "e": "ü",
        "st": "x,z",
        "bt": 641,
        "j": '{"a":1}',
        "ge": "0x000000000101000000000000000000f03f0000000000000040",
        "d": "-12.345",
        "ti": "-12:34:56.789",
        "dt": "2024-02-03 04:05:06.123456",
        "ts": "2024-01-01 00:00:00.12",
        "y": 2024,
        "f": 0.1,
        "db1": 1e300,
        "tx": "hé",
        "inv": 7,
    }


def test_events_of_many_rows_keep_their_order_and_key_update_is_delete_and_create(tmp_path: Path) -> None:
    many = INSERT + ROW.replace(b"\x00\x00\x80\x01", b"\x00\x00\x80\x03", 1)
    messages = [begin(100, 1), many, begin(200, 2), UPDATE, many]
    events = decoded(tmp_path, messages)
    assert [(event["id"], event["op"], event["key"]) for event in events] == [
        ("s:100:0", "c", '{"id":1}'),
        ("s:100:1", "c", '{"id":3}'),
        ("s:200:0", "d", '{"id":1}'),
        ("s:200:0.1", "c", '{"id":2}'),
        ("s:200:1", "c", '{"id":1}'),
        ("s:200:2", "c", '{"id":3}'),
    ]
    lengths = [len(message) for message in messages]
    assert count_changes(b"".join(messages), lengths, {"18": table()}).tolist() == [0, 2, 0, 1, 2]
    assert [event["id"] for event in decoded(tmp_path, messages, after=200)] == [event["id"] for event in events[2:]]
    partitions = [decoded(tmp_path, messages, partition=partition, partitions=3) for partition in range(3)]
    assert sorted(event["id"] for partition in partitions for event in partition) == sorted(
        event["id"] for event in events
    )
    [path] = [path for path in tmp_path.iterdir() if path.name == "0.seg"]
    assert (gtid_before(read_segment(path), 150), gtid_before(read_segment(path), 300)) == ("0-1-1", "0-1-2")
    assert gtid_before(read_segment(path), 50) is None


def test_transaction_in_several_files_is_numbered_consecutively_and_rollback_removes_its_files(
    tmp_path: Path,
) -> None:
    read_ahead = ReadAheadLog(tmp_path, 0, 1 << 30, count_changes)
    opened = {"lsn": 100, "ts_ms": 5, "gtid": [0, 1, 1], "number": 0}
    read_ahead.describe(18, table(), None)
    for message in (begin(100, 1), INSERT):
        read_ahead.add(message, change=message is INSERT)
    read_ahead.part(opened)
    read_ahead.add(UPDATE, change=True)
    read_ahead.commit(150, "0-1-1")
    read_ahead.add(begin(200, 2), change=False)
    read_ahead.add(INSERT, change=True)
    read_ahead.abandon()
    read_ahead.add(begin(300, 3), change=False)
    read_ahead.add(INSERT, change=True)
    read_ahead.commit(350, "0-1-3")
    read_ahead.seal()
    files = [file for each in read_ahead.ranges(0, 350) for file in each.files]
    events = [row for file in files for row in decode_changes(read_segment(file), Decoding("s")).to_pylist()]
    assert [event["id"] for event in events] == ["s:100:0", "s:100:1", "s:100:1.1", "s:300:0"]
    assert (read_ahead.changes(0, 350), read_ahead.changes(0, 150), read_ahead.gtids) == (3, 2, "0-1-3")
    read_ahead.add(begin(400, 4), change=False)
    read_ahead.add(INSERT, change=True)
    read_ahead.part({**opened, "lsn": 400})
    read_ahead.abandon()
    assert sorted(tmp_path.glob("*open.seg")) == files[:1], "the file of a rolled-back transaction is removed"


def test_small_batch_decodes_only_its_own_transactions_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each batch of a backlog would cost as much as decoding the whole file."""
    walk, walked = decode.walk_rows, []

    def counted(body: Bytes, starts: Numbers, *arguments: Any) -> RowSlices:
        walked.extend(starts.tolist())
        return walk(body, starts, *arguments)

    monkeypatch.setattr(decode, "walk_rows", counted)
    messages = [part for lsn in range(100, 1100, 100) for part in (begin(lsn, lsn), INSERT, UPDATE)]
    whole = decoded(tmp_path, messages)
    assert len(whole) == 30  # the update changes the key
    del walked[:]
    batches = [decoded(tmp_path, messages, after=at, upto=at + 100) for at in range(0, 1200, 100)]
    assert [event for batch in batches for event in batch] == whole
    assert len(walked) == len(set(walked)) == 20


def test_log_positions_are_increasing_integers() -> None:
    assert position_of("binlog.000002", 4) > position_of("binlog.000001", 0xFFFF0000)
    assert file_at(position_of("a.b.1234567", 99), "a.b") == ("a.b.1234567", 99)
    with pytest.raises(UnreadableMessage):
        position_of("nothing", 4)


def test_control_events_are_parsed() -> None:
    gtid = parse_gtid(memoryview(b"\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00"), 1)
    assert (str(gtid), gtid.flags) == ("0-1-3", 12)
    query = (
        b"\x05\x00\x00\x00\x00\x00\x00\x00\x0b\x00\x00\x1a\x00\x00\x00\x00\x00\x01\x01\x00\x00 T\x00\x00\x00\x00\x06"
        b"\x03std\x04-\x00-\x00-\x00db_144019a7\x00CREATE DATABASE db_144019a7"
    )
    assert parse_query(memoryview(query), CHARSETS) == Query("db_144019a7", "CREATE DATABASE db_144019a7")
    quotes = parse_query(memoryview(query.replace(b"\x01\x00\x00 T", b"\x01\x04\x00\x30T")), CHARSETS)
    assert (quotes.ansi_quotes, quotes.backslash_escapes) == (True, False)
    rotate = struct.pack("<Q", 4) + b"binlog.000002"
    assert parse_rotate(memoryview(rotate)) == ("binlog.000002", 4)


@pytest.mark.parametrize(
    ("collation", "name"),
    [(45, "\u00e4"), (8, "\u00c3\u00a4"), (63, "\u00e4"), (51, "\ufffd\ufffd"), (None, "\u00e4")],
    ids=["utf8mb4", "latin1", "binary", "cp1251", "not in the event"],
)
def test_statement_is_decoded_from_the_character_set_of_its_client(collation: int | None, name: str) -> None:
    charset = b"" if collation is None else b"\x04" + collation.to_bytes(2, "little") + b"-\x00-\x00"
    status = b"\x00\x00\x00\x00\x00\x01\x00\x00 T\x00\x00\x00\x00\x06\x03std\x03\x02\x00\x01\x00" + charset
    head = struct.pack("<IIBHH", 5, 0, 4, 0, len(status))
    query = parse_query(memoryview(head + status + b"shop\0TRUNCATE \xc3\xa4"), {**CHARSETS, 51: "cp1251"})
    assert query == Query("shop", f"TRUNCATE {name}")


def test_counting_rows_reads_nothing_past_the_last_event() -> None:
    assert count_changes(b"", [], {}).tolist() == []
    assert np.array_equal(count_changes(INSERT, [len(INSERT)], {"18": table()}), [1])
