"""A proxy in front of a real server that can answer commands itself, to simulate errors of the server.

Some errors of a server are hard to provoke (full disk, hanging script, migrating slot). A function decides for each
command: forward it, reply with an error, lose its reply, or cut the connection. A transaction with a rejected command
is aborted at EXEC, as on a real server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Self

import hiredis

MISSING = object()
ABORTED = b"-EXECABORT Transaction discarded because of previous errors.\r\n"
HANDSHAKE = frozenset({b"PING", b"AUTH", b"HELLO", b"SELECT", b"CLIENT"})
"""Commands that a client sends on a new connection before the first command of the caller."""
LISTENING = frozenset({b"SUBSCRIBE", b"PSUBSCRIBE", b"MONITOR"})


class Request(NamedTuple):
    """A command on a connection. Without ``args``: the connection itself, before its first command."""

    args: tuple[bytes, ...]
    connection: int
    number: int
    """The number of the command on its connection, from 0 on."""
    in_transaction: bool
    """Whether the command is after MULTI, up to and including EXEC."""

    @property
    def name(self) -> bytes:
        return self.args[0].upper() if self.args else b""

    @property
    def opening(self) -> bool:
        """Whether the request is part of opening the connection: the connection itself, or its handshake."""
        return not self.args or (self.number < 2 and self.name in HANDSHAKE)

    @property
    def blocks(self) -> bool:
        return b"BLOCK" in map(bytes.upper, self.args)


class ProxyAnswer(NamedTuple):
    """What the proxy does with a request instead of forwarding it and returning the reply."""

    text: bytes = b""
    """Sent to the client instead of the server's reply. Empty: nothing is sent."""
    forward: bool = False
    """The server executes the command, and its reply is lost."""
    cut: bool = False
    """Closes the connection, after sending ``text``."""
    after_s: float = 0.0
    """The delay before the answer."""


def refusal(text: str, *, after_s: float = 0.0, cut: bool = False) -> ProxyAnswer:
    """An answer with an error reply."""
    return ProxyAnswer(f"-{text}\r\n".encode(), after_s=after_s, cut=cut)


ANSWER_LOST = ProxyAnswer(forward=True, cut=True)

Choice = Callable[[Request], ProxyAnswer | None]


def pass_on(request: Request) -> ProxyAnswer | None:
    """Forwards every request."""
    return None


class AnsweringProxy:
    """``with AnsweringProxy(port, choose) as proxy``: clients connect to ``proxy.port``.

    It runs on its own thread, so that it can serve blocking clients and other processes; ``choose`` is called on that
    thread. ``proxy.choose`` may be replaced at any time. ``answered`` counts the requests that were not simply
    forwarded. ``listen`` is the address of the proxy; port 0 selects a free port.
    """

    def __init__(
        self,
        port: int,
        choose: Choice = pass_on,
        *,
        host: str = "127.0.0.1",
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._target = host, port
        self._listen_address = listen
        self.choose = choose
        self.answered = 0
        self.port = 0
        self._connections = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="answering proxy")

    @property
    def url(self) -> str:
        return f"redis://{self._listen_address[0]}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        server = self._run_on_loop(asyncio.start_server(self._serve, *self._listen_address))
        self._server = server
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *raised: object) -> None:
        self._run_on_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut_all(self) -> None:
        """Cuts all open connections."""
        self._run_on_loop(self._cut_all())

    def _run_on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _close(self) -> None:
        self._server.close()
        await self._cut_all()

    async def _cut_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connections += 1
        connection = _ProxiedConnection(self, self._connections, reader, writer)
        try:
            await connection.run(*self._target)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # one side closed the connection, or it was cut: the client receives a connection error
        finally:
            connection.cut()


class _ProxiedConnection:
    """A client connection, and its connection to the server."""

    def __init__(
        self, proxy: AnsweringProxy, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._reader = reader
        self._writer = writer
        self._server: asyncio.StreamWriter | None = None
        self._replies = b""
        self._request_count = 0
        self._in_transaction = self._aborted = False

    def cut(self) -> None:
        for writer in (self._writer, self._server):
            if writer is not None:
                writer.transport.abort()

    async def run(self, host: str, port: int) -> None:
        if not await self._answer(Request((), self._number, 0, False)):
            return
        self._from_server, self._server = await asyncio.open_connection(host, port)
        requests: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._read_requests(requests)), asyncio.create_task(self._answer_all(requests))]
        try:
            # The end of either side ends the other: a client may disconnect while it is blocked at the server.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_requests(self, requests: asyncio.Queue[tuple[bytes, ...]]) -> None:
        parser = hiredis.Reader(notEnoughData=MISSING)
        while data := await self._reader.read(65536):
            parser.feed(data)
            while (args := parser.gets()) is not MISSING:
                requests.put_nowait(tuple(args))

    async def _answer_all(self, requests: asyncio.Queue[tuple[bytes, ...]]) -> None:
        while True:
            args = await requests.get()
            name = args[0].upper()
            if name == b"MULTI":
                self._in_transaction, self._aborted = True, False
            request = Request(args, self._number, self._request_count, self._in_transaction and name != b"MULTI")
            self._request_count += 1
            if not await self._answer(request):
                self.cut()
                return
            if name in LISTENING:
                while data := await self._from_server.read(65536):
                    self._writer.write(data)

    async def _answer(self, request: Request) -> bool:
        """Answers one request. False: the connection ends."""
        answer = self._proxy.choose(request)
        ends = request.name in (b"EXEC", b"DISCARD")
        if answer is None:
            if request.args:
                await self._forward(request, ends)
            return True
        self._proxy.answered += 1
        if answer.after_s:
            await asyncio.sleep(answer.after_s)
        if answer.forward and request.args:
            await self._execute(request.args)
        elif request.in_transaction:
            self._aborted = True
            if ends:
                await self._execute((b"DISCARD",))
        if ends:
            self._in_transaction = False
        self._writer.write(answer.text)
        if answer.cut:
            with suppress(OSError):
                await self._writer.drain()
        return not answer.cut

    async def _forward(self, request: Request, ends: bool) -> None:
        if request.name == b"EXEC" and self._aborted:
            await self._execute((b"DISCARD",))
            reply = ABORTED
        else:
            reply = await self._execute(request.args)
        if ends:
            self._in_transaction = False
        self._writer.write(reply)
        await self._writer.drain()

    async def _execute(self, args: tuple[bytes, ...]) -> bytes:
        """Executes one command on the server, and returns the raw reply."""
        assert self._server is not None
        self._server.write(hiredis.pack_command(args))  # type: ignore[arg-type]  # its stub says a single argument
        while (end := reply_end(self._replies, 0)) is None:
            chunk = await self._from_server.read(65536)
            if not chunk:
                raise EOFError
            self._replies += chunk
        reply, self._replies = self._replies[:end], self._replies[end:]
        return reply


def reply_end(data: bytes, start: int) -> int | None:
    """The end of the RESP2 reply that begins at ``start``; None if it is incomplete."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return None
    after = line + 2
    kind = data[start : start + 1]
    if kind == b"$":
        length = int(data[start + 1 : line])
        end = after + length + 2 if length >= 0 else after
        return end if end <= len(data) else None
    if kind == b"*":
        for _ in range(max(0, int(data[start + 1 : line]))):
            element_end = reply_end(data, after)
            if element_end is None:
                return None
            after = element_end
    return after
