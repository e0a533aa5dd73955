"""A session that hangs in a call to its database when it is told to end."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from millstream.cdc import database
from millstream.cdc.database import ChangeSession
from millstream.cdc.spool import LogSpool


class HangingSession(ChangeSession):
    """Has spooled half a transaction; then its connection is lost, and connecting again hangs until it is let go."""

    def __init__(self, spool: LogSpool) -> None:
        super().__init__(spool, "db.example:5432/shop")
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def acknowledge(self, position: int) -> None:
        raise NotImplementedError

    def _stream(self) -> None:
        self._spool.add(b"half", change=True)
        self._spool.part({"lsn": 1})
        self.hangs.set()
        assert self.goes_on.wait(60)
        self._spool.restart()


def test_one_that_does_not_end_is_told_and_touches_no_file_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "STOP_S", 0.01)
    session = HangingSession(LogSpool(tmp_path, 0, 1 << 20))
    session.start()
    try:
        assert session.hangs.wait(60)
        with caplog.at_level(logging.WARNING):
            session.stop()
        assert session.is_alive()
        assert "db.example:5432/shop" in caplog.text
        [successors] = tmp_path.iterdir()  # whoever follows the database now writes a part of the same name
    finally:
        session.goes_on.set()
        session.join(60)
    assert not session.is_alive()
    assert successors.exists()


def test_one_that_ends_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = HangingSession(LogSpool(tmp_path, 0, 1 << 20))
    session.start()
    session.goes_on.set()
    session.stop()
    assert not session.is_alive()
    assert caplog.text == ""
    session.stop()
