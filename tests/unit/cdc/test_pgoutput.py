"""Messages of pgoutput as literal bytes, as PostgreSQL 15 sends them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import SegmentDamaged, UnreadableMessage
from millstream.cdc.json_columns import NumericAs
from millstream.cdc.postgres.decode import decode_changes
from millstream.cdc.postgres.pgoutput import (
    format_lsn,
    parse_begin,
    parse_commit,
    parse_lsn,
    parse_relation,
    parse_truncate,
)
from millstream.cdc.segments import read_commits, read_segment, write_segment

BEGIN = b"B\x00\x00\x00\x00\x01\x96\x3f\x58\x00\x02\xcd\x14\x8d\x0b\x24\xc0\x00\x00\x02\xe7"
COMMIT = b"C\x00\x00\x00\x00\x00\x01\x96\x3f\x58\x00\x00\x00\x00\x01\x96\x3f\x88\x00\x02\xcd\x14\x8d\x0b\x24\xc0"
ORDERS = (
    b"R\x00\x00\x40\x05public\x00orders\x00d\x00\x03"
    b"\x01id\x00\x00\x00\x00\x17\xff\xff\xff\xff"
    b"\x00note\x00\x00\x00\x00\x19\xff\xff\xff\xff"
    b"\x00price\x00\x00\x00\x06\xa4\x00\x0a\x00\x06"
)
INSERT = b'I\x00\x00\x40\x05N\x00\x03t\x00\x00\x00\x017t\x00\x00\x00\x05say"\nt\x00\x00\x00\x059.900'[:-1] + b"0"
UPDATE = b"U\x00\x00\x40\x05N\x00\x03t\x00\x00\x00\x017ut\x00\x00\x00\x0210"
MOVED = b"U\x00\x00\x40\x05K\x00\x03t\x00\x00\x00\x017nnN\x00\x03t\x00\x00\x00\x018nt\x00\x00\x00\x03NaN"
DELETE = b"D\x00\x00\x40\x05K\x00\x03t\x00\x00\x00\x018nn"
TRUNCATE = b"T\x00\x00\x00\x02\x00\x00\x00\x40\x05\x00\x00\x40\x09"


def decoded(tmp_path: Path, messages: list[bytes], relation: bytes = ORDERS, **decoding: Any) -> list[dict[str, Any]]:
    metadata = {"relations": {str(parse_relation(relation).id): parse_relation(relation).to_json()}}
    metadata |= decoding.pop("metadata", {})
    path = tmp_path / "one.seg"
    path.unlink(missing_ok=True)
    assert write_segment(path, b"".join(messages), array("I", map(len, messages)), metadata)
    return decode_changes(read_segment(path), Decoding("shop", "db", **decoding)).to_pylist()


def test_begin_has_commit_position_time_and_transaction_id() -> None:
    begin = parse_begin(BEGIN)
    assert (begin.lsn, begin.xid) == (parse_lsn("0/1963F58"), 743)
    assert begin.ts_ms == 946_684_800_000 + 0x0002CD148D0B24C0 // 1000


def test_commit_has_its_end_position() -> None:
    assert (parse_commit(COMMIT).lsn, format_lsn(parse_commit(COMMIT).end)) == (0x1963F58, "0/1963F88")


def test_relation_has_columns_with_types_and_the_key() -> None:
    relation = parse_relation(ORDERS)
    assert (relation.id, relation.schema, relation.table, relation.identity) == (0x4005, "public", "orders", "d")
    assert [(c.name, c.type, c.key, c.kind) for c in relation.columns] == [
        ("id", 23, True, "number"),
        ("note", 25, False, "text"),
        ("price", 1700, False, "numeric"),
    ]
    assert type(relation).from_json(json.loads(json.dumps(relation.to_json()))) == relation


def test_empty_schema_means_pg_catalog_and_trailing_bytes_are_refused() -> None:
    assert parse_relation(b"R\x00\x00\x00\x01\x00t\x00d\x00\x00").schema == "pg_catalog"
    with pytest.raises(UnreadableMessage):
        parse_relation(ORDERS + b"\x00")


def test_truncate_lists_its_tables() -> None:
    assert parse_truncate(TRUNCATE) == (0x4005, 0x4009)


def test_insert_is_c_with_after_and_key(tmp_path: Path) -> None:
    [event] = decoded(tmp_path, [BEGIN, INSERT, COMMIT])
    assert event["id"] == f"shop:{0x1963F58}:0"
    assert (event["op"], event["key"], event["before"]) == ("c", '{"id":7}', None)
    assert json.loads(event["after"]) == {"id": 7, "note": 'say"\n', "price": "9.900"}
    assert (event["db"], event["schema"], event["table"]) == ("db", "public", "orders")
    assert event["position"] == {"lsn": 0x1963F58, "transaction": "743", "order": 0}


def test_unsent_value_is_omitted_or_replaced_and_never_null(tmp_path: Path) -> None:
    [event] = decoded(tmp_path, [BEGIN, UPDATE, COMMIT])
    assert (event["op"], event["before"], event["after"]) == ("u", None, '{"id":7,"price":"10"}')
    [event] = decoded(tmp_path, [BEGIN, UPDATE, COMMIT], unchanged="__gone")
    assert event["after"] == '{"id":7,"note":"__gone","price":"10"}'


def test_changed_key_is_d_and_c(tmp_path: Path) -> None:
    gone, come = decoded(tmp_path, [BEGIN, MOVED, COMMIT], unchanged="__gone")
    assert (gone["op"], gone["key"], gone["before"], gone["after"]) == ("d", '{"id":7}', '{"id":7}', None)
    assert (come["op"], come["key"], come["before"]) == ("c", '{"id":8}', None)
    assert come["after"] == '{"id":8,"note":null,"price":"NaN"}'
    assert come["id"] == gone["id"] + ".1"


def test_delete_has_only_the_key(tmp_path: Path) -> None:
    [event] = decoded(tmp_path, [BEGIN, DELETE, COMMIT])
    assert (event["op"], event["key"], event["before"]) == ("d", '{"id":8}', '{"id":8}')


def test_truncate_is_one_t_per_followed_table(tmp_path: Path) -> None:
    insert, truncate = decoded(tmp_path, [BEGIN, INSERT, TRUNCATE, COMMIT])
    assert (insert["op"], truncate["op"], truncate["table"]) == ("c", "t", "orders")
    assert truncate["id"] == f"shop:{0x1963F58}:1"
    assert (truncate["key"], truncate["before"], truncate["after"]) == (None, None, None)


def test_change_numbers_continue_in_the_next_segment_of_a_transaction(tmp_path: Path) -> None:
    before = {"open": {"lsn": 99, "ts_ms": 5, "xid": 3, "number": 4}}
    first, second = decoded(tmp_path, [INSERT, COMMIT, BEGIN, DELETE, COMMIT], metadata=before)
    assert (first["id"], first["ts_ms"], first["position"]["transaction"]) == ("shop:99:4", 5, "3")
    assert second["id"] == f"shop:{0x1963F58}:0"


def test_only_transactions_within_the_batch_are_decoded(tmp_path: Path) -> None:
    messages = [BEGIN, INSERT, COMMIT]
    end = parse_commit(COMMIT).end
    assert len(decoded(tmp_path, messages, upto=end)) == 1
    assert decoded(tmp_path, messages, after=end) == []
    assert decoded(tmp_path, messages, upto=0x1963F58) == []


@pytest.mark.parametrize(
    ("numeric", "price"), [("text", '"9.900"'), ("double", "9.900"), ("decimal(3)", "9.900"), ("decimal(1)", '"9.900"')]
)
def test_numeric_is_written_as_configured_without_losing_digits(tmp_path: Path, numeric: str, price: str) -> None:
    decoding = NumericAs.parse(numeric)
    assert decoding is not None
    [event] = decoded(tmp_path, [BEGIN, INSERT, COMMIT], numeric=decoding)
    assert f'"price":{price}' in event["after"]


def test_incomplete_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.seg"
    marks = (array("Q", [7]), array("Q", [1]), array("Q", [9]))
    assert write_segment(path, b"abc", array("I", [3]), {"a": 1}, marks)
    assert not write_segment(path, b"other", array("I", [5]), {}), "the first file is kept"
    assert read_segment(path).metadata == {"a": 1}
    assert read_commits(path).positions.tolist() == [7]
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(SegmentDamaged):
            read_segment(path)
