"""One connection on one event loop, as an asyncio protocol: requests are sent in order, and replies complete them in
order.

Many tasks may share it. If a task is cancelled, its request stays in the queue: the reply is read and discarded, so
that no other task receives it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis

from millstream.broker.context import Limits
from millstream.broker.transport.blocking_connection import chunks_of, pack, pack_all, readable
from millstream.broker.transport.routes import NoAnswer, NotSent
from millstream.wire import Args, ErrorReply, Reading, return_unchanged

_MISSING: Final = object()
MAX_OUTGOING_BYTES: Final = 64 * 1024
"""Outgoing data is written at this size without waiting for more: joining copies it."""


class _PendingRequest:
    """A request in the queue: the number of replies that it still needs, and the future that waits for them."""

    __slots__ = ("count", "future", "replies", "wait_s")

    def __init__(self, future: asyncio.Future[list[Any]], count: int, wait_s: float | None) -> None:
        self.future = future
        self.count = count
        self.wait_s = wait_s
        self.replies: list[Any] = []


READ_BYTES: Final = 64 * 1024
"""The size of the buffer that is reused for every read. Otherwise asyncio would allocate 256 KiB for each read and free
most of it again, which costs more than reading.
"""


class _RepliesOnly:
    """A parser that passes RESP3 pushes on, and returns only replies."""

    def __init__(self, reader: hiredis.Reader, on_push: Callable[[Any], None]) -> None:
        self.feed = reader.feed
        self._gets = reader.gets
        self._on_push = on_push

    def gets(self) -> Any:
        while type(reply := self._gets()) is hiredis.PushNotification:
            self._on_push(reply)
        return reply


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection, shared by the tasks of one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self._writer = writer  # kept alive: collecting it would close the transport
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # streams declare the write half
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reader: Any = hiredis.Reader(replyError=ErrorReply, notEnoughData=_MISSING, errors="surrogateescape")
        self._incoming = memoryview(bytearray(READ_BYTES))
        self._pending: deque[_PendingRequest] = deque()
        self._outgoing: list[bytes | memoryview] = []
        """Data that follows what was already written in this iteration of the event loop."""
        self._outgoing_bytes = 0
        self._last_read_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        sock = self._transport.get_extra_info("socket")
        tls = self._transport.get_extra_info("ssl_object") is not None  # with TLS, readable bytes may be a TLS record
        self._descriptor: int | None = sock.fileno() if sock is not None and not tls else None
        self._lost: str | None = None
        self._client_id: int | None = None
        self.on_push: Callable[[Any], None] | None = None
        """Set on a subscribed connection: it receives every reply, because no request waits for one."""
        self.on_lost: Callable[[], None] | None = None
        self._transport.set_protocol(self)
        self._transport.set_write_buffer_limits(high=limits.chunk_bytes)
        self._adopt_received(reader)
        # Streams pause reading when their buffer is full; ours has no such buffer.
        if not self._transport.is_reading():
            self._transport.resume_reading()

    def _adopt_received(self, reader: asyncio.StreamReader) -> None:
        """Handles data and end of file that the old stream reader received before the protocol was replaced.

        A server without a free connection slot sends an error and closes before any request. The error is processed
        after the first request was sent, as its reply.
        """
        early: bytes = bytes(reader._buffer)  # type: ignore[attr-defined]  # there is no public accessor
        if early:
            self._loop.call_soon(self._received, early)
        if (failure := reader.exception()) is not None:
            self._fail(str(failure))
        elif reader._eof:  # type: ignore[attr-defined]
            self._loop.call_soon(self.eof_received)

    # --- called by tasks --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    def is_usable(self) -> bool:
        """False if the connection is broken, or its socket is readable although no reply is expected.

        Without the check of the socket, a closed connection would be noticed only after the next write, when a command
        that is not repeatable may have been lost.
        """
        if not self.alive:
            return False
        if self._pending or self._descriptor is None:
            return True
        try:
            return not readable(self._descriptor)
        except (OSError, ValueError):  # the descriptor is closed
            return False

    @property
    def idle_s(self) -> float:
        """The time since the last data arrived, while no request is pending."""
        return 0.0 if self._pending else self._loop.time() - self._last_read_s

    async def client_id(self) -> int:
        """The server's number for this connection, requested once; 0 if the server does not report it."""
        if self._client_id is None:
            (reply,) = await self.exchange([(b"CLIENT", b"ID")])
            self._client_id = reply if type(reply) is int else 0
        return self._client_id

    async def exchange(
        self,
        requests: Sequence[Args],
        wait_ms: int | None = 0,
        whole: bool = False,
        reading: Reading = return_unchanged,
    ) -> list[Any]:
        """Sends requests and returns their replies. Raises only NotSent or NoAnswer. Cancelling keeps the connection
        usable.
        """
        wait_s = None if wait_ms is None else wait_ms / 1000
        try:
            if self._writable is not None:
                await self._drained()
            if len(requests) > 1 and not whole:
                return await self._send_in_chunks(requests, wait_s, reading)
            data = pack(requests[0]) if len(requests) == 1 else pack_all(requests)
            replies = await self._send(data, len(requests), wait_s)
            return reading(replies)
        except (NotSent, NoAnswer):
            raise
        except Exception as error:
            # After an unexpected error it is unknown what was sent and which request the next reply belongs to.
            self._fail(f"{type(error).__name__}: {error}")
            raise NoAnswer(f"{type(error).__name__}: {error}") from error

    async def _send_in_chunks(self, requests: Sequence[Args], wait_s: float | None, reading: Reading) -> list[Any]:
        """Sends a large batch in chunks, several of them in flight.

        The server executes a chunk while the next is packed and earlier replies are read. The number of chunks is
        limited, so that the socket buffers of neither side fill up.
        """
        replies: list[Any] = []
        in_flight: deque[asyncio.Future[list[Any]]] = deque()
        try:
            for data, count in chunks_of(requests, self._limits):
                if len(in_flight) == self._limits.chunks_ahead:
                    replies += reading(await in_flight.popleft())
                if self._writable is not None:
                    await self._drained()
                in_flight.append(self._send(data, count, wait_s))
            while in_flight:
                replies += reading(await in_flight.popleft())
        except NotSent as error:
            if replies or in_flight:
                raise NoAnswer(str(error), replies) from error
            raise
        except NoAnswer as error:
            error.replies = [*replies, *reading(list(error.replies))]
            raise
        return replies

    def _send(self, data: bytes | memoryview, count: int, wait_s: float | None) -> asyncio.Future[list[Any]]:
        if self._lost is not None or self._transport.is_closing():
            raise NotSent(self._lost or "the connection is closed")
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        alone = not self._pending
        self._pending.append(_PendingRequest(future, count, wait_s))
        if alone:
            self._last_read_s = self._loop.time()
            self._transport.write(data)
        else:
            self._write_later(data)
        if self._timer is None:
            self._check_timeout()
        return future

    def _write_later(self, data: bytes | memoryview) -> None:
        """Collects data of the current iteration of the event loop and writes it at once.

        The first request of an idle connection is written immediately. Requests of other tasks in the same iteration
        follow in one write: a hundred publishers cost one system call and one round trip.
        """
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes >= MAX_OUTGOING_BYTES:
            self._flush()

    def _flush(self) -> None:
        outgoing, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        if outgoing and self._lost is None:
            try:
                self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
            except Exception as error:  # a callback of the loop: nothing else would fail the requests that wait
                self._fail(f"{type(error).__name__}: {error}")

    async def _drained(self) -> None:
        writable = self._writable
        if writable is not None:
            await asyncio.shield(writable)

    def separate_pushes(self, on_push: Callable[[Any], None]) -> None:
        """For a connection that changes to RESP3: pushes arrive between replies and belong to no request."""
        self._reader = _RepliesOnly(self._reader, on_push)

    def subscribe(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self, reason: str = "closed") -> None:
        self._fail(reason)

    # --- called by the event loop -----------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming

    def buffer_updated(self, nbytes: int) -> None:
        self._received(self._incoming[:nbytes])

    def _received(self, data: bytes | memoryview) -> None:
        self._last_read_s = self._loop.time()
        reader = self._reader
        try:
            reader.feed(data)
            gets = reader.gets
            pending = self._pending
            while True:
                reply = gets()
                if reply is _MISSING:
                    return
                if not pending:
                    self._receive_push(reply)
                    continue
                request = pending[0]
                replies = request.replies
                replies.append(reply)
                expected = request.count
                while len(replies) < expected:
                    reply = gets()
                    if reply is _MISSING:
                        return
                    replies.append(reply)
                pending.popleft()
                if not request.future.done():
                    request.future.set_result(replies)
        except hiredis.ProtocolError as error:
            self._fail(f"the server sent invalid RESP: {error}")
        except Exception as error:  # a callback of the loop: nothing else would fail the requests that wait
            self._fail(f"a reply could not be read: {type(error).__name__}: {error}")

    def _receive_push(self, reply: Any) -> None:
        if self.on_push is not None:
            self.on_push(reply)
        else:
            detail = f": {reply}" if isinstance(reply, ErrorReply) else ""
            self._fail(f"the server sent an unexpected reply{detail}")

    def eof_received(self) -> bool:
        self._fail("the server closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "the server closed the connection")

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # --- timeouts ---------------------------------------------------------------------------------------------------

    def _check_timeout(self) -> None:
        """Fails the connection if the first pending request has timed out. One timer serves all requests of the
        connection.
        """
        self._timer = None
        if not self._pending or self._lost is not None:
            return
        wait_s = self._pending[0].wait_s
        if wait_s is None:
            return  # no time limit, as requested: TCP keepalive detects a dead peer
        due = self._last_read_s + wait_s + self._limits.answer_ms / 1000
        if due <= self._loop.time():
            self._fail(f"no reply within {wait_s + self._limits.answer_ms / 1000:g} s")
            return
        self._timer = self._loop.call_at(due, self._check_timeout)

    def _fail(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._transport.abort()
        except Exception:  # noqa: S110 - the connection is abandoned anyway, and its requests must fail
            pass
        pending, self._pending = self._pending, deque()
        for request in pending:
            if not request.future.done():
                request.future.set_exception(NoAnswer(reason, request.replies))
                request.future.exception()  # marks it as retrieved: of a batch, only the first chunk is awaited
        self.resume_writing()
        if self.on_lost is not None:
            self.on_lost()
