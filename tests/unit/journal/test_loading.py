"""Frames of any size are restored, in whatever chunks the parser receives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.journal.frames import _PARSER_CHUNK_BYTES


@pytest.mark.parametrize("size", [1, 1000, _PARSER_CHUNK_BYTES - 40, _PARSER_CHUNK_BYTES, 5 * _PARSER_CHUNK_BYTES])
def test_commands_across_read_boundaries_are_parsed(tmp_path: Path, size: int) -> None:
    embedded = Embedded(directory=tmp_path, housekeeping=False)
    session = embedded.session()
    with embedded.turn() as turn:  # one frame for all of them
        for number in range(100):
            turn.execute(session, (b"SET", b"key %d" % number, b"%d" % number + b"\r\n$x*" * (size // 5)))
        turn.execute(session, (b"MULTI",))
        turn.execute(session, (b"INCR", b"n"))
        turn.execute(session, (b"EXEC",))
        assert turn.end() is None
    written = dict(embedded.engine.databases[0].values)
    embedded.close()

    again = Embedded(directory=tmp_path, housekeeping=False)

    assert dict(again.engine.databases[0].values) == written
    assert len(written) == 101
    again.close()
