"""The supervisor's end of a worker's status pipe: receives lines of bounded length."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

MAX_LINE_BYTES: Final = 1 << 20
"""A longer line is dropped."""


class StatusPipe(asyncio.Protocol):
    """Calls ``on_line`` with each line. The worker inherits ``write_fd``.

    The pipe may stay open after the worker has ended, because a forked child of the worker can hold it open.
    """

    def __init__(self, write_fd: int, on_line: Callable[[bytes], None]) -> None:
        self.write_fd = write_fd
        self.ended = asyncio.Event()
        self._on_line = on_line
        self._line = bytearray()
        self._is_too_long = False
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, on_line: Callable[[bytes], None]) -> StatusPipe:
        read_fd, write_fd = os.pipe()
        pipe = cls(write_fd, on_line)
        reader = os.fdopen(read_fd, "rb", buffering=0)
        try:
            pipe._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: pipe, reader)
        except OSError:
            reader.close()
            os.close(write_fd)
            raise
        return pipe

    def close_write_end(self) -> None:
        """Call it after the worker has inherited the write end: then the pipe ends with the worker."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        self.close_write_end()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        *lines, incomplete = data.split(b"\n")
        for line in lines:
            self._add(line)
            if not self._is_too_long:
                self._on_line(bytes(self._line))
            self._line.clear()
            self._is_too_long = False
        self._add(incomplete)

    def _add(self, data: bytes) -> None:
        self._is_too_long = self._is_too_long or len(self._line) + len(data) > MAX_LINE_BYTES
        if self._is_too_long:
            self._line.clear()
        else:
            self._line += data

    def eof_received(self) -> None:
        self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
