"""Ctrl-C ends a running command, also if Python drops the exception."""

from __future__ import annotations

import os
import signal

import pytest

from millstream.cli.top import UntilInterrupted


class Tidied:
    """Interrupted in its destructor: Python reports the exception and continues."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # a signal is handled between two steps
            pass


def test_interrupt_ends_top_without_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    rounds = 0
    with UntilInterrupted() as going:
        while going:
            rounds += 1
            os.kill(os.getpid(), signal.SIGINT)
    assert rounds == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_that_python_drops_ends_top(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)
    rounds = 0
    with UntilInterrupted() as going:
        while going:
            rounds += 1
            Tidied()
    assert (rounds, len(dropped)) == (1, 1)
