"""Rows as commands in bulk, and the interpretation of the replies to their transaction."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.scripts.append_once import Digest
from millstream.errors import OutOfMemory, ServerError, WrongKeyType
from millstream.spark.bulk import Appends, UniformRows, transaction_result
from millstream.spark.errors import RowsMiscounted
from millstream.wire.commands import ErrorReply
from millstream.wire.resp import pack

tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.binary(max_size=12), min_size=width, max_size=width), min_size=1, max_size=20)
)


@given(tables, st.integers(0, 20), st.integers(0, 20))
def test_bulk_packing_gives_the_same_bytes_as_packing_each_row(table: list[list[bytes]], first: int, past: int) -> None:
    names = [b"name%d" % n for n in range(len(table[0]))]
    rows = UniformRows(names, [pa.array(column, pa.binary()) for column in zip(*table, strict=True)])
    Appends(b"another", rows).packed()
    Appends(b"s", rows).packed()
    part = rows[first:past]
    expected = [(b"XADD", b"s", b"*", *row) for row in part]

    assert list(Appends(b"s", part)) == expected
    assert bytes(Appends(b"s", part).packed()) == b"".join(map(pack, expected))
    row_digest, bulk_digest = Digest(), Digest()
    row_digest.add(part)
    if len(part):
        bulk_digest.add_packed(part.names, part.packed_values())
    assert row_digest.hexdigest() == bulk_digest.hexdigest()


GATE, GONE = b"OK", 1
FULL = ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")


def test_transaction_result_returns_the_opening_reply() -> None:
    assert transaction_result([[b"OK"], GATE, b"1-1", b"1-2", [b"OK", b"2", b"1-2"], GONE], 2) == [b"OK"]
    stale = [b"STALE", b"7"]
    assert transaction_result([stale, GATE, FULL, FULL, [b"SHUT"], GONE], 2) == stale


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([[b"OK"], GATE, b"1-1", [b"OK", b"2", b"1-1"], GONE], RowsMiscounted),
        ([[b"STALE", b"7"], GATE, FULL, b"1-1", [b"SHUT"], GONE], RowsMiscounted),
        (
            [[b"OK"], GATE, b"1-1", ErrorReply("ERR too large"), ErrorReply("ERR not all"), GONE],
            ServerError,
        ),
        ([ErrorReply("WRONGTYPE no"), ErrorReply("ERR no such key"), FULL, FULL, ErrorReply("ERR"), 0], WrongKeyType),
        ([*[ErrorReply("EXECABORT previous errors")] * 4, ErrorReply("OOM no"), ErrorReply("EXECABORT")], OutOfMemory),
    ],
)
def test_transaction_result_raises_every_error(replies: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        transaction_result(replies, 2)
