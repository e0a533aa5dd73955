"""Event headers have 32-bit positions; transactions that end beyond 4 GiB of a file must not be skipped."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from millstream.cdc.errors import PositionLost, SourceUnreachable
from millstream.cdc.mariadb import binlog
from millstream.cdc.mariadb.connection import MariadbLogin
from millstream.cdc.mariadb.session import BinlogSession
from millstream.cdc.options import DatabaseAddress
from millstream.cdc.read_ahead import ReadAheadLog

GIB = 1 << 30
FILE = 7


def _event(kind: int, body: bytes, end: int, flags: int = 0) -> bytes:
    return struct.pack("<IBIIIH", 1_700_000_000, kind, 1, 19 + len(body), end & 0xFFFFFFFF, flags) + body


def _transaction(sequence: int, start: int, end: int) -> list[bytes]:
    """Events of a TRUNCATE that ends at ``end``: a GTID event and a standalone statement."""
    gtid = struct.pack("<QIB", sequence, 0, binlog.STANDALONE) + bytes(6)
    statement = b"TRUNCATE TABLE orders"
    query = struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0" + statement
    filler = b"\0" * 8
    events = [_event(binlog.GTID, gtid, start + 19 + len(gtid))]
    at = start + 19 + len(gtid)
    while end - at > GIB:  # no event and no gap is larger than this
        at += GIB
        events.append(_event(binlog.ANNOTATE, filler, at))
    return [*events, _event(binlog.QUERY, query, end)]


def _rotate(number: int, offset: int = 4) -> bytes:
    return _event(binlog.ROTATE, struct.pack("<Q", offset) + f"binlog.{number:06d}".encode(), 0, binlog.ARTIFICIAL)


@pytest.fixture
def read_ahead(tmp_path: Path) -> ReadAheadLog:
    return ReadAheadLog(tmp_path, FILE << 32 | 256, 1 << 20)


@pytest.fixture
def session(read_ahead: ReadAheadLog) -> BinlogSession:
    login = MariadbLogin(DatabaseAddress("mariadb://u@h/shop"))
    made = BinlogSession(
        login, 1, ["orders"], read_ahead, server="s", gtids="", on_table=lambda *_: None, recorded=dict
    )
    made._file, made._place = FILE, 256
    return made


def _feed(session: BinlogSession, events: list[bytes]) -> None:
    for event in events:
        session._event(event)


def _commit_positions(read_ahead: ReadAheadLog) -> list[tuple[int, int]]:
    read_ahead.seal()
    return [
        (position >> 32, position & 0xFFFFFFFF)
        for each in read_ahead.ranges(0, 1 << 62)
        for position in each.commits.positions.tolist()
    ]


def test_transactions_beyond_4_gib_end_at_the_start_of_the_next_file(
    session: BinlogSession, read_ahead: ReadAheadLog
) -> None:
    _feed(session, _transaction(1, 256, 1024))
    _feed(session, _transaction(2, 1024, 4 * GIB + 500))
    assert not session._between(), "the reader does not wait for capacity before the planner can see them"
    _feed(session, _transaction(3, 4 * GIB + 500, 4 * GIB + 900))
    assert read_ahead.position == FILE << 32 | 1024
    session._event(_rotate(FILE + 1))
    assert session._between()
    _feed(session, _transaction(4, 4, 300))
    assert _commit_positions(read_ahead) == [(FILE, 1024), (FILE + 1, 4), (FILE + 1, 300)]
    truncations: list[Any] = read_ahead.truncations(0)
    assert [each["transaction"] for each in truncations] == ["0-1-1", "0-1-2", "0-1-3", "0-1-4"]
    positions = [each["lsn"] for each in truncations]
    assert positions == sorted(set(positions)), "each transaction has its own position, and positions ascend"
    assert all(offset >> 32 == file for offset, file in zip(positions, [FILE, FILE, FILE, FILE + 1], strict=True))


def test_log_that_goes_backwards_is_an_error(session: BinlogSession) -> None:
    _feed(session, _transaction(1, 256, 5000))
    with pytest.raises(PositionLost, match="backwards"):
        _feed(session, _transaction(2, 300, 900))


def test_file_that_goes_backwards_is_an_error(session: BinlogSession) -> None:
    with pytest.raises(PositionLost, match="reset"):
        session._event(_rotate(FILE - 1))


def test_offset_beyond_4_gib_is_not_a_position() -> None:
    assert binlog.position_of("binlog.000007", 4) == 7 << 32 | 4
    with pytest.raises(SourceUnreachable, match="4 GiB"):
        binlog.position_of("binlog.000007", 4 * GIB + 4)
