"""Frames of any size come back as they were written, though the parser is fed with them in morsels."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.journal.frames import _MORSEL


@pytest.mark.parametrize("size", [1, 1000, _MORSEL - 40, _MORSEL, 5 * _MORSEL])
def test_commands_that_lie_across_morsels(tmp_path: Path, size: int) -> None:
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
