"""A session that hangs in a call to its database when it is stopped."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from millstream.cdc import database
from millstream.cdc.database import ChangeSession
from millstream.cdc.read_ahead import ReadAheadLog


class HangingSession(ChangeSession):
    """Reads half of a transaction, loses its connection, and hangs in the next connect until it is released."""

    def __init__(self, read_ahead: ReadAheadLog) -> None:
        super().__init__(read_ahead, "db.example:5432/shop")
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def acknowledge(self, position: int) -> None:
        raise NotImplementedError

    def _stream(self) -> None:
        self._read_ahead.add(b"half", change=True)
        self._read_ahead.part({"lsn": 1})
        self.hangs.set()
        assert self.goes_on.wait(60)
        self._read_ahead.restart()


def test_session_that_does_not_stop_is_logged_and_changes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "STOP_S", 0.01)
    session = HangingSession(ReadAheadLog(tmp_path, 0, 1 << 20))
    session.start()
    try:
        assert session.hangs.wait(60)
        with caplog.at_level(logging.WARNING):
            session.stop()
        assert session.is_alive()
        assert "db.example:5432/shop" in caplog.text
        [successors] = tmp_path.iterdir()  # the session that reads the database now writes a part of the same name
    finally:
        session.goes_on.set()
        session.join(60)
    assert not session.is_alive()
    assert successors.exists()


def test_session_that_stops_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = HangingSession(ReadAheadLog(tmp_path, 0, 1 << 20))
    session.start()
    session.goes_on.set()
    session.stop()
    assert not session.is_alive()
    assert caplog.text == ""
    session.stop()
