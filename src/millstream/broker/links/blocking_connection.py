"""One connection for one thread at a time: bytes out, replies in, on a plain socket.

What it shares with a connection for event loops is here too: commands as bytes, packed in C, and a long batch cut into
chunks that are bounded by count and by size.
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

from millstream.broker.bulk import InBulk, Joined, SameShape
from millstream.broker.context import Limits
from millstream.broker.links.routes import NoAnswer, NotSent
from millstream.wire import Args, ErrorReply, Reading, as_they_are

_MISSING: Final = object()
READ_SIZE: Final = 256 * 1024


_pack_short = cast("Callable[[Args], bytes]", hiredis.pack_command)
_LONG: Final = 64
_LENGTHS: Final = [b"$%d" % length for length in range(1024)]
"""What stands before a word of so many bytes."""


def pack(words: Args) -> bytes:
    """A command as it travels. One of many words (batches, reads of many streams) is joined from texts that are there
    already, in half of hiredis's time; one of large words is left to it, for it is copying that takes the time."""
    count = len(words)
    if count < _LONG:
        return _pack_short(words)
    parts = [b""] * (2 * count + 2)
    try:
        parts[1:-1:2] = map(_LENGTHS.__getitem__, map(len, words))
    except IndexError:
        return _pack_short(words)
    parts[0] = b"*%d" % count
    parts[2:-1:2] = words
    return b"\r\n".join(parts)


def chunks_of(requests: Sequence[Args], limits: Limits) -> Iterator[tuple[bytes, int]]:
    """Packed chunks with the number of commands in each.

    The number that fits is guessed from the chunk before; a chunk that came out too big is cut in two.
    """
    if type(requests) is SameShape:
        yield from _chunks_of_columns(requests, limits)
        return
    start, step = 0, limits.chunk_commands
    while start < len(requests):
        packed = list(map(pack, requests[start : start + step]))
        data = b"".join(packed)
        if len(data) > limits.chunk_bytes and len(packed) > 1:
            kept = max(1, len(packed) * limits.chunk_bytes // (2 * len(data)))
            step = kept
            packed = packed[:kept]
            data = b"".join(packed)
        elif len(data) < limits.chunk_bytes // 4:
            step = min(limits.chunk_commands, step * 2)
        start += len(packed)
        yield data, len(packed)


def _chunks_of_columns(requests: SameShape, limits: Limits) -> Iterator[tuple[bytes, int]]:
    start, total = 0, len(requests)
    while start < total:
        piece = requests[start : start + limits.chunk_commands]
        while len(piece) > 1 and piece.size() > limits.chunk_bytes:
            piece = piece[: (len(piece) + 1) // 2]
        yield piece.packed(), len(piece)
        start += len(piece)


def pieces_of(requests: Sequence[Args]) -> Iterable[bytes | memoryview]:
    """What ``pack_all`` gives, uncopied where it is large already."""
    return requests.pieces() if type(requests) is Joined else (pack_all(requests),)


def pack_all(requests: Sequence[Args]) -> bytes | memoryview:
    return requests.packed() if isinstance(requests, InBulk) else b"".join(map(pack, requests))


def readable(descriptor: int) -> bool:
    """Whether something has come, the end of the connection included."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class BlockingConnection:
    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_MISSING, errors="surrogateescape")
        self._heard = time.monotonic()
        self.alive = True

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._heard

    def quiet(self) -> bool:
        """False when something came unasked: the server has closed the connection, or is out of step."""
        if not self.alive:
            return False
        try:
            if not isinstance(self._sock, ssl.SSLSocket):
                return not readable(self._sock.fileno())
            # Bytes may be there that are TLS's own (session tickets): only reading tells.
            self._sock.settimeout(0)
            self._sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        except Exception:  # noqa: S110 - whatever it is, nothing can be trusted to this connection
            pass
        return False

    def exchange(
        self, requests: Sequence[Args], wait_ms: int | None = 0, whole: bool = False, reading: Reading = as_they_are
    ) -> list[Any]:
        """Raises NoAnswer, and nothing else; then the connection is closed."""
        replies: list[Any] = []
        try:
            # While sending, and for the answer to begin: the usual silence on top of what the server may wait.
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
        except TimeoutError as error:
            self.close()
            raise NoAnswer("no answer in time", replies) from error
        except Exception as error:
            self.close()
            raise NoAnswer(str(error) or type(error).__name__, replies) from error
        except BaseException:
            # An interrupt in the middle: the next reply would be another's.
            self.close()
            raise

    def _send_in_chunks(self, requests: Sequence[Args], results: list[Any], reading: Reading) -> list[Any]:
        """A few chunks under way: the server works while the next is packed and the replies before it are read, and
        no side's buffers fill up. ``results`` grows chunk by chunk.
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
        """So many more."""
        gets, append = self._reader.gets, replies.append
        while missing > 0:
            reply = gets()
            if reply is _MISSING:
                data = self._sock.recv(READ_SIZE)
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                self._heard = time.monotonic()
                self._reader.feed(data)
                continue
            append(reply)
            missing -= 1

    def send(self, requests: Sequence[Args]) -> None:
        """For a subscriber: nothing is read."""
        try:
            self._sock.sendall(pack_all(requests))
        except Exception as error:
            self.close()
            raise NotSent(str(error)) from error

    def receive(self, timeout_s: float | None) -> Any:
        """For a subscriber: the next thing that comes; TimeoutError when nothing does."""
        self._sock.settimeout(timeout_s)
        replies: list[Any] = []
        try:
            self._read(replies, 1)
        except TimeoutError:
            raise
        except Exception as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return replies[0]

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def received(self) -> list[Any]:
        """For a subscriber whose socket is readable: whatever is complete."""
        try:
            data = self._sock.recv(READ_SIZE)
        except (TimeoutError, BlockingIOError):
            return []
        except Exception as error:
            self.close()
            raise NoAnswer(str(error)) from error
        if not data:
            self.close()
            raise NoAnswer("the server closed the connection")
        replies = []
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MISSING:
                replies.append(reply)
        except Exception as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return replies

    def interrupt(self) -> None:
        """From another thread: whoever waits on it wakes up and finds it closed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self.alive = False
        try:
            self._sock.close()
        except Exception:  # noqa: S110 - it is gone either way
            pass
