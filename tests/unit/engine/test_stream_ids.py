"""Stream ids as clients write them: which Redis accepts."""

from __future__ import annotations

import pytest

from millstream.engine.stream.ids import (
    ID_MAX,
    SEQ_MAX,
    format_id,
    parse_end,
    parse_id,
    parse_ids,
    parse_new_id,
    parse_start,
    read_id,
)
from millstream.wire.commands import ErrorReply


def entry_id(ms: int, seq: int) -> int:
    return ms << 64 | seq


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"1-2", entry_id(1, 2)),
        (b"7", entry_id(7, 0)),
        (b"0-0", 0),
        (b"18446744073709551615-18446744073709551615", ID_MAX),
        (b"03-004", entry_id(3, 4)),
        (b" 1-1", entry_id(1, 1)),
        (b"+3-+4", entry_id(3, 4)),
        (b"1- -1", entry_id(1, SEQ_MAX)),
        (b"3-4\x00x", entry_id(3, 4)),
        (b"3\x00-4", entry_id(3, 0)),
    ],
)
def test_accepted_ids(raw: bytes, expected: int) -> None:
    assert parse_id(raw) == expected
    assert read_id(raw) == expected
    assert parse_ids([b"1-1", raw, b"2-2"]) == [entry_id(1, 1), expected, entry_id(2, 2)]


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"-", b"+", b"x", b"1-", b"-1", b"1--1", b"1-1-1", b"1-x", b"3-4 ", b"1-*", b"*", b"1_0-1", b"1-1_0"),
        *(b"18446744073709551616-0", b"0-18446744073709551616", b"1" * 200, b"1.5-0", b"\xd9\xa1-\xd9\xa1"),
    ],
)
def test_rejected_ids(raw: bytes) -> None:
    for parse in (parse_id, lambda item: parse_ids([item]), lambda element: parse_ids([b"1-1", element])):
        with pytest.raises(ErrorReply, match="Invalid stream ID"):
            parse(raw)
    assert read_id(raw) is None


def test_many_ids_parse_like_single_ids() -> None:
    words = [b"1700000000000-%d" % number for number in range(50)] + [b"5", b"1700000000000-05", b"1700000000001-0"]
    assert parse_ids(words) == [parse_id(word) for word in words]


def test_partial_id_gets_a_sequence_number() -> None:
    assert parse_new_id(b"5-*") == (entry_id(5, 0), False)
    assert parse_new_id(b"5-1") == (entry_id(5, 1), True)
    assert parse_new_id(b"5") == (entry_id(5, 0), True)
    for raw in (b"*-*", b"-*", b"5-**", b"5--*", b"x-*"):
        with pytest.raises(ErrorReply):
            parse_new_id(raw)


def test_bounds_of_intervals() -> None:
    assert (parse_start(b"-"), parse_end(b"+")) == (0, ID_MAX)
    assert (parse_start(b"+"), parse_end(b"-")) == (ID_MAX, 0)
    assert (parse_start(b"5"), parse_end(b"5")) == (entry_id(5, 0), entry_id(5, SEQ_MAX))
    assert (parse_start(b"(5-1"), parse_end(b"(5-1")) == (entry_id(5, 2), entry_id(5, 0))
    assert parse_start(b"(5-%d" % SEQ_MAX) == entry_id(6, 0)
    assert parse_end(b"(5-0") == entry_id(4, SEQ_MAX)
    for raw in (b"(-", b"(+", b"(", b"((1"):
        with pytest.raises(ErrorReply, match="Invalid stream ID"):
            parse_start(raw)
    with pytest.raises(ErrorReply, match="invalid start ID for the interval"):
        parse_start(b"(18446744073709551615-18446744073709551615")
    with pytest.raises(ErrorReply, match="invalid end ID for the interval"):
        parse_end(b"(0-0")


def test_ids_print_as_redis_prints_them() -> None:
    assert format_id(entry_id(1_700_000_000_000, 42)) == b"1700000000000-42"
    assert format_id(ID_MAX) == b"18446744073709551615-18446744073709551615"
