"""One connection on one event loop, as an asyncio protocol: requests go out in order, replies settle them in order.

Many tasks may share it. A task that goes away leaves its place in the queue: its reply is read and thrown away,
so that nobody ever gets the reply of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis

from millstream.broker.context import Limits
from millstream.broker.links.blocking_connection import chunks_of, pack, pack_all, readable
from millstream.broker.links.routes import NoAnswer, NotSent
from millstream.wire import Args, ErrorReply, Reading, as_they_are

_MISSING: Final = object()
GATHERED_BYTES: Final = 64 * 1024
"""With so much, nothing is waited for any longer: buffers have bounds, and joining copies."""


class _Place:
    """One request's place in the queue: how many replies it still gets, and who waits for them."""

    __slots__ = ("count", "future", "replies", "wait_s")

    def __init__(self, future: asyncio.Future[list[Any]], count: int, wait_s: float | None) -> None:
        self.future = future
        self.count = count
        self.wait_s = wait_s
        self.replies: list[Any] = []


READ_BYTES: Final = 64 * 1024
"""Read into one place again and again: for each read of its own asyncio takes a quarter of a megabyte from the system
and gives most of it back, which costs more than reading."""


class AsyncConnection(asyncio.BufferedProtocol):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self._writer = writer  # kept alive: collecting it would close the transport
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # streams declare the write half
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_MISSING, errors="surrogateescape")
        self._incoming = memoryview(bytearray(READ_BYTES))
        self._places: deque[_Place] = deque()
        self._outgoing: list[bytes | memoryview] = []
        """Behind what was written in this turn of the loop already."""
        self._outgoing_bytes = 0
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        sock = self._transport.get_extra_info("socket")
        tls = self._transport.get_extra_info("ssl_object") is not None  # whose bytes are not all for us
        self._descriptor: int | None = sock.fileno() if sock is not None and not tls else None
        self._lost: str | None = None
        self._client_id: int | None = None
        self.on_push: Callable[[Any], None] | None = None
        """Set on a connection that subscribes: it gets every reply, for none is asked for."""
        self.on_lost: Callable[[], None] | None = None
        self._transport.set_protocol(self)
        self._transport.set_write_buffer_limits(high=limits.chunk_bytes)
        self._take_over(reader)
        # Streams pause reading when their buffer is full; ours has no such buffer.
        if not self._transport.is_reading():
            self._transport.resume_reading()

    def _take_over(self, reader: asyncio.StreamReader) -> None:
        """What has come by now lies with the old reader, and nobody else will tell: a server that has no room for us
        says so, and hangs up, before it is asked. It is heard after the first request was sent, as the answer to it."""
        early: bytes = bytes(reader._buffer)  # type: ignore[attr-defined]  # there is no public look at it
        if early:
            self._loop.call_soon(self._received, early)
        if (trouble := reader.exception()) is not None:
            self._fail(str(trouble))
        elif reader._eof:  # type: ignore[attr-defined]
            self._loop.call_soon(self.eof_received)

    # --- what tasks call --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    def in_order(self) -> bool:
        """False when it is broken, or about to be told so: then nothing should be sent that may not be repeated.

        Without the look at the socket a server's death would be noticed one write too late.
        """
        if not self.alive:
            return False
        if self._places or self._descriptor is None:
            return True
        try:
            return not readable(self._descriptor)
        except Exception:  # the descriptor is nobody's any more
            return False

    @property
    def idle_s(self) -> float:
        """How long nothing has come, while nothing was asked for."""
        return 0.0 if self._places else self._loop.time() - self._heard

    async def client_id(self) -> int:
        """The server's number for this connection, asked once; 0 where it does not tell."""
        if self._client_id is None:
            (reply,) = await self.exchange([(b"CLIENT", b"ID")])
            self._client_id = reply if type(reply) is int else 0
        return self._client_id

    async def exchange(
        self, requests: Sequence[Args], wait_ms: int | None = 0, whole: bool = False, reading: Reading = as_they_are
    ) -> list[Any]:
        """Raises NotSent or NoAnswer, and nothing else. Cancelling leaves the connection usable."""
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
            # Nobody has foreseen it, so nobody knows what was sent, and whose the next reply is.
            self._fail(f"{type(error).__name__}: {error}")
            raise NoAnswer(f"{type(error).__name__}: {error}") from error

    async def _send_in_chunks(self, requests: Sequence[Args], wait_s: float | None, reading: Reading) -> list[Any]:
        """A few chunks under way: the server works while the next is packed and the replies before it are read, and
        no side's buffers fill up.
        """
        replies: list[Any] = []
        under_way: deque[asyncio.Future[list[Any]]] = deque()
        try:
            for data, count in chunks_of(requests, self._limits):
                if len(under_way) == self._limits.chunks_ahead:
                    replies += reading(await under_way.popleft())
                if self._writable is not None:
                    await self._drained()
                under_way.append(self._send(data, count, wait_s))
            while under_way:
                replies += reading(await under_way.popleft())
        except NotSent as error:
            if replies or under_way:
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
        alone = not self._places
        self._places.append(_Place(future, count, wait_s))
        if alone:
            self._heard = self._loop.time()
            self._transport.write(data)
        else:
            self._gather(data)
        if self._timer is None:
            self._watch()
        return future

    def _gather(self, data: bytes | memoryview) -> None:
        """Whoever finds the connection idle does not wait. What others send in the same turn of the loop leaves in one
        go behind it: publishers to a hundred topics cost one system call, and one round trip, not a hundred."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes >= GATHERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        outgoing, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        if outgoing and self._lost is None:
            try:
                self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")

    async def _drained(self) -> None:
        writable = self._writable
        if writable is not None:
            await asyncio.shield(writable)

    def subscribe(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self, reason: str = "closed") -> None:
        self._fail(reason)

    # --- what the loop calls ----------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming

    def buffer_updated(self, nbytes: int) -> None:
        self._received(self._incoming[:nbytes])

    def _received(self, data: bytes | memoryview) -> None:
        self._heard = self._loop.time()
        reader = self._reader
        try:
            reader.feed(data)  # type: ignore[arg-type]  # its stub does not know buffers
            gets = reader.gets
            places = self._places
            while True:
                reply = gets()
                if reply is _MISSING:
                    return
                if not places:
                    self._unasked(reply)
                    continue
                place = places[0]
                replies = place.replies
                replies.append(reply)
                wanted = place.count
                while len(replies) < wanted:
                    reply = gets()
                    if reply is _MISSING:
                        return
                    replies.append(reply)
                places.popleft()
                if not place.future.done():
                    place.future.set_result(replies)
        except hiredis.ProtocolError as error:
            self._fail(f"the server sent what is not RESP: {error}")
        except Exception as error:
            self._fail(f"an answer could not be read: {type(error).__name__}: {error}")

    def _unasked(self, reply: Any) -> None:
        if self.on_push is not None:
            self.on_push(reply)
        else:
            said = f": {reply}" if isinstance(reply, ErrorReply) else ""
            self._fail(f"the server sent a reply that nobody asked for{said}")

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

    # --- silence ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """One timer for the connection, not one for each call: does the first in the queue wait in vain?"""
        self._timer = None
        if not self._places or self._lost is not None:
            return
        wait_s = self._places[0].wait_s
        if wait_s is None:
            return  # for ever, as the caller asked: keepalive probes notice a peer that is gone
        due = self._heard + wait_s + self._limits.answer_ms / 1000
        if due <= self._loop.time():
            self._fail(f"no answer within {wait_s + self._limits.answer_ms / 1000:g} s")
            return
        self._timer = self._loop.call_at(due, self._watch)

    def _fail(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._transport.abort()
        except Exception:  # noqa: S110 - it is given up either way, and whoever waits for it must hear
            pass
        places, self._places = self._places, deque()
        for place in places:
            if not place.future.done():
                place.future.set_exception(NoAnswer(reason, place.replies))
                place.future.exception()  # seen: of a batch's chunks only the first is waited for
        self.resume_writing()
        if self.on_lost is not None:
            self.on_lost()
