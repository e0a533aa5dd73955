"""A log handler for standard error that never waits for the process that reads it."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import traceback
from collections import deque
from typing import Final
from weakref import WeakMethod

MAX_WAITING_BYTES: Final = 1 << 20
"""Log lines that wait for the reader of standard error. More of them are dropped."""
MAX_BYTES_PER_WRITE: Final = select.PIPE_BUF
"""Lines are written together up to this size, which several processes can write to one pipe without mixing lines."""
PATIENCE_S: Final = 0.05
"""How long a thread that logs waits when lines wait already: it may only be faster than the thread that writes."""
FLUSH_TIMEOUT_S: Final = 1.0
"""How long the end of the process waits for the reader."""


class StderrHandler(logging.Handler):
    """Writes log lines to standard error in a thread of its own.

    ``logging.StreamHandler`` writes in the thread that logs. If standard error is a pipe whose reader stalls, the event
    loop stops there, with all handlers and heartbeats. Here lines wait, up to ``MAX_WAITING_BYTES``. Further lines are
    dropped until the reader has caught up; then one line says how many.
    """

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._start_empty()
        restart = WeakMethod(self._start_empty)
        os.register_at_fork(after_in_child=lambda: (own := restart()) and own())

    def _start_empty(self) -> None:
        """Also in a forked child: the thread and the waiting lines belong to the parent."""
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        """Lines from the first one on are being written."""
        self._waiting_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self._line(record))
        except Exception:  # as in the handlers of the standard library
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # a method of logging.Handler
        """Logs where a record could not be formatted."""
        if logging.raiseExceptions:
            text = f"cannot format the log line of {record.pathname}:{record.lineno}\n{traceback.format_exc()}"
            self._put(text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Waits until all lines are written, for ``FLUSH_TIMEOUT_S`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, FLUSH_TIMEOUT_S)

    def _line(self, record: logging.LogRecord) -> bytes:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        return (self.format(record) + "\n").encode(encoding, "backslashreplace")

    def _put(self, line: bytes) -> None:
        with self._changed:
            # While lines are being dropped, all are: the line that reports their number must stand in their place.
            if self._dropped or not self._changed.wait_for(lambda: self._has_room(line), PATIENCE_S):
                self._dropped += 1
                return
            self._append(line)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="millstream-log", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # the system has no thread left: the next line tries again
                self._thread = thread
            self._changed.notify_all()

    def _has_room(self, line: bytes) -> bool:
        return not self._lines or self._waiting_bytes + len(line) <= MAX_WAITING_BYTES

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting_bytes += len(line)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = self._next_lines()
            self._write(b"".join(lines))
            with self._changed:
                for line in lines:
                    self._lines.popleft()
                    self._waiting_bytes -= len(line)
                if not self._lines and self._dropped:
                    self._append(self._line(_report(self._dropped)))
                    self._dropped = 0
                self._changed.notify_all()

    def _next_lines(self) -> list[bytes]:
        """Several short lines, or one."""
        lines: list[bytes] = []
        size = 0
        for line in self._lines:
            size += len(line)
            if lines and size > MAX_BYTES_PER_WRITE:
                break
            lines.append(line)
        return lines

    def _write(self, data: bytes) -> None:
        remaining = memoryview(data)
        while remaining:
            try:
                remaining = remaining[os.write(self._fd, remaining) :]
            except BlockingIOError:  # another process that shares the pipe made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return  # the reader is gone


def _report(dropped: int) -> logging.LogRecord:
    lines = "log line was" if dropped == 1 else "log lines were"
    text = f"{dropped} {lines} dropped here: standard error was not read"
    return logging.LogRecord("millstream.log", logging.WARNING, __file__, 0, text, None, None)
