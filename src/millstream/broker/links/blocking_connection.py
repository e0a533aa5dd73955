"""One connection for one thread at a time: bytes out, replies in, on a plain socket."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from millstream.broker.context import Limits
from millstream.broker.links.packing import chunks_of, pack, pack_all, pieces_of
from millstream.broker.links.routes import NoAnswer, NotSent
from millstream.wire import Args, ErrorReply, Reading, as_they_are

_MISSING: Final = object()
READ_SIZE: Final = 256 * 1024


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
