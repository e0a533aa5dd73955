"""Ctrl-C for commands that run until they are told to end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class UntilInterrupted:
    """``with UntilInterrupted() as going: while going: ...`` ends at Ctrl-C, at once and without an error.

    The interrupt is remembered as well as raised: Python drops what is raised while it tidies an object away.
    """

    def __init__(self) -> None:
        self._interrupted = False

    def __bool__(self) -> bool:
        return not self._interrupted

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        signal.signal(signal.SIGINT, self._before)
        return self._interrupted and kind is KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt
