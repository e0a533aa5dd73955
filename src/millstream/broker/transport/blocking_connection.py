"""One connection for one thread at a time, on a plain socket; and packing of commands, which async connections use too.

Commands are packed in C. A long batch is split into chunks that are limited by count and by size.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import hiredis

from millstream.broker.bulk import CombinedCommands, PackedCommands, UniformCommands
from millstream.broker.context import Limits
from millstream.broker.transport.routes import NoAnswer, NotSent
from millstream.wire import Args, ErrorReply, Reading, return_unchanged

_MISSING: Final = object()
READ_SIZE: Final = 256 * 1024


_pack_short = cast("Callable[[Args], bytes]", hiredis.pack_command)
_MANY_ARGS: Final = 64
_LENGTH_PREFIXES: Final = [b"$%d" % length for length in range(1024)]
"""The bytes before an argument, by its length."""


def pack(args: Args) -> bytes:
    """A command as bytes. With many arguments it is joined from prepared prefixes, twice as fast as hiredis.

    Large arguments are left to hiredis, because there copying dominates.
    """
    count = len(args)
    if count < _MANY_ARGS:
        return _pack_short(args)
    parts = [b""] * (2 * count + 2)
    try:
        parts[1:-1:2] = map(_LENGTH_PREFIXES.__getitem__, map(len, args))
    except IndexError:
        return _pack_short(args)
    parts[0] = b"*%d" % count
    parts[2:-1:2] = args
    return b"\r\n".join(parts)


def chunks_of(requests: Sequence[Args], limits: Limits) -> Iterator[tuple[bytes, int]]:
    """Packed chunks, and the number of commands in each.

    The number of commands that fit is estimated from the previous chunk; a chunk that is too large is cut.
    """
    if type(requests) is UniformCommands:
        yield from _chunks_of_columns(requests, limits)
        return
    start, step = 0, limits.chunk_commands
    while start < len(requests):
        packed = list(map(pack, requests[start : start + step]))
        data = b"".join(packed)
        if len(data) > limits.chunk_bytes and len(packed) > 1:
            chunk_length = max(1, len(packed) * limits.chunk_bytes // (2 * len(data)))
            step = chunk_length
            packed = packed[:chunk_length]
            data = b"".join(packed)
        elif len(data) < limits.chunk_bytes // 4:
            step = min(limits.chunk_commands, step * 2)
        start += len(packed)
        yield data, len(packed)


def _chunks_of_columns(requests: UniformCommands, limits: Limits) -> Iterator[tuple[bytes, int]]:
    start, total = 0, len(requests)
    while start < total:
        piece = requests[start : start + limits.chunk_commands]
        while len(piece) > 1 and piece.size() > limits.chunk_bytes:
            piece = piece[: (len(piece) + 1) // 2]
        yield piece.packed(), len(piece)
        start += len(piece)


def pieces_of(requests: Sequence[Args]) -> Iterable[bytes | memoryview]:
    """The pieces of ``pack_all``, without copying pieces that are packed already."""
    return requests.pieces() if type(requests) is CombinedCommands else (pack_all(requests),)


def pack_all(requests: Sequence[Args]) -> bytes | memoryview:
    """All commands as bytes."""
    return requests.packed() if isinstance(requests, PackedCommands) else b"".join(map(pack, requests))


def readable(descriptor: int) -> bool:
    """Whether data or the end of the connection can be read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class BlockingConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_MISSING, errors="surrogateescape")
        self._last_read_s = time.monotonic()
        self.alive = True

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._last_read_s

    def is_usable(self) -> bool:
        """False if the connection is broken, or data arrived although no reply is expected."""
        if not self.alive:
            return False
        try:
            if not isinstance(self._sock, ssl.SSLSocket):
                return not readable(self._sock.fileno())
            # Readable bytes may be a TLS record such as a session ticket, so try to read application data.
            self._sock.settimeout(0)
            self._sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        except (OSError, ValueError):  # ValueError: the socket was closed and has no descriptor
            pass
        return False

    def exchange(
        self,
        requests: Sequence[Args],
        wait_ms: int | None = 0,
        whole: bool = False,
        reading: Reading = return_unchanged,
    ) -> list[Any]:
        """Sends requests and returns their replies. Raises only NoAnswer, after closing the connection."""
        replies: list[Any] = []
        try:
            # The timeout for sending and for the first reply: the usual one plus the time that the server may wait.
            self._sock.settimeout(None if wait_ms is None else (wait_ms + self._limits.answer_ms) / 1000)
            if len(requests) == 1:
                self._sock.sendall(pack(requests[0]))
                self._read(replies, 1)
            elif whole:
                for piece in pieces_of(requests):
                    self._sock.sendall(piece)
                self._read(replies, len(requests))
            else:
                return self._send_in_chunks(requests, replies, reading)
            return reading(replies)
        except BaseException as error:
            # After any error, and after an interruption, the next reply would belong to another request.
            self.close()
            if not isinstance(error, Exception):
                raise
            why = "no reply in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise NoAnswer(why, replies) from error

    def _send_in_chunks(self, requests: Sequence[Args], results: list[Any], reading: Reading) -> list[Any]:
        """Sends a large batch in chunks, several of them in flight; ``results`` grows with each chunk of replies.

        The server executes a chunk while the next is packed and earlier replies are read. The number of chunks is
        limited, so that the socket buffers of neither side fill up.
        """
        due: deque[int] = deque()

        def receive() -> None:
            replies: list[Any] = []
            try:
                self._read(replies, due.popleft())
            finally:
                results.extend(reading(replies))

        for data, count in chunks_of(requests, self._limits):
            if len(due) == self._limits.chunks_ahead:
                receive()
            self._sock.sendall(data)
            due.append(count)
        while due:
            receive()
        return results

    def _read(self, replies: list[Any], missing: int) -> None:
        """Reads ``missing`` more replies."""
        gets, append = self._reader.gets, replies.append
        while missing > 0:
            reply = gets()
            if reply is _MISSING:
                data = self._sock.recv(READ_SIZE)
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                self._last_read_s = time.monotonic()
                self._reader.feed(data)
                continue
            append(reply)
            missing -= 1

    def send(self, requests: Sequence[Args]) -> None:
        """Sends without reading replies, for a subscriber."""
        try:
            self._sock.sendall(pack_all(requests))
        except OSError as error:
            self.close()
            raise NotSent(str(error)) from error

    def receive(self, timeout_s: float | None) -> Any:
        """The next reply, for a subscriber. Raises TimeoutError if none arrives."""
        self._sock.settimeout(timeout_s)
        replies: list[Any] = []
        try:
            self._read(replies, 1)
        except TimeoutError:
            raise
        except (OSError, hiredis.HiredisError) as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return replies[0]

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def received(self) -> list[Any]:
        """All complete replies, for a subscriber whose socket is readable."""
        replies = []
        try:
            data = self._sock.recv(READ_SIZE)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MISSING:
                replies.append(reply)
        except (TimeoutError, BlockingIOError):
            return []
        except (OSError, hiredis.HiredisError) as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return replies

    def interrupt(self) -> None:
        """Closes the connection from another thread: a thread that waits on it wakes up with an error."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self.alive = False
        try:
            self._sock.close()
        except OSError:
            pass  # the connection is abandoned anyway
