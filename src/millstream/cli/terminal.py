"""Ctrl-C and single keys, for commands that run until they are told to end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
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


class Keys:
    """``with Keys() as keys: keys.wait(2.0)`` gives a key as soon as it is pressed, or nothing when the time is over.

    Where nobody sits at the terminal it only waits. The terminal is as it was when the block ends.
    """

    def __enter__(self) -> Self:
        self._here = sys.stdin.isatty()
        if self._here:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        if not self._here:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
