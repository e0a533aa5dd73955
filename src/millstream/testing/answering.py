"""A proxy that answers for the server: it stands before a real one, and says of each command whether that one hears it.

Servers refuse in states that are hard to bring about (a disk that is full, a script that hangs, a slot on its way).
Here a function decides, command by command: pass it on, refuse it with any text, lose its answer, cut the connection.
A transaction of which a command was refused is refused at its end, as a server does it.
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
"""What is said on a new connection before the first command of a caller."""
LISTENING = frozenset({b"SUBSCRIBE", b"PSUBSCRIBE", b"MONITOR"})


class Request(NamedTuple):
    """One command of one connection; or the connection itself, before anything was said: then it has no words."""

    words: tuple[bytes, ...]
    connection: int
    number: int
    """The command's place on its connection, from 0 on."""
    in_transaction: bool
    """Between MULTI and EXEC; EXEC itself included."""

    @property
    def name(self) -> bytes:
        return self.words[0].upper() if self.words else b""

    @property
    def opening(self) -> bool:
        """Said while the connection is made: the connection itself, or the first words on it."""
        return not self.words or (self.number < 2 and self.name in HANDSHAKE)

    @property
    def blocks(self) -> bool:
        return b"BLOCK" in map(bytes.upper, self.words)


class ProxyAnswer(NamedTuple):
    """What the proxy does with a request instead of passing it on and its reply back."""

    text: bytes = b""
    """Sent to the client; the server hears nothing. Empty: nothing is sent."""
    forward: bool = False
    """The server executes it, and its answer is lost."""
    cut: bool = False
    """Ends the connection, after the text where there is one."""
    after_s: float = 0.0
    """How long the client waits for it, as a blocked one does."""


def refusal(text: str, *, after_s: float = 0.0, cut: bool = False) -> ProxyAnswer:
    """An error reply in the server's name."""
    return ProxyAnswer(f"-{text}\r\n".encode(), after_s=after_s, cut=cut)


ANSWER_LOST = ProxyAnswer(forward=True, cut=True)

Choice = Callable[[Request], ProxyAnswer | None]


def pass_on(request: Request) -> ProxyAnswer | None:
    """Everything goes its way."""
    return None


class AnsweringProxy:
    """``with AnsweringProxy(port, choose) as proxy``: clients connect to ``proxy.port``.

    It runs on a thread of its own, so that blocking clients and other processes are served too; ``choose`` is called
    there. Set ``proxy.choose`` to something else at any time. ``answered`` counts what it answered itself.
    ``listen`` is where it is to be found: any free port, unless it is told one.
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
        self._listen = listen
        self.choose = choose
        self.answered = 0
        self.port = 0
        self._connections = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="answering proxy")

    @property
    def url(self) -> str:
        return f"redis://{self._listen[0]}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        server = self._do(asyncio.start_server(self._serve, *self._listen))
        self._server = server
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *raised: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut_all(self) -> None:
        """Every connection that is open now."""
        self._do(self._cut_all())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
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
        conversation = _Conversation(self, self._connections, reader, writer)
        try:
            await conversation.hold(*self._target)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # either side is gone, or it was cut: the client sees that
        finally:
            conversation.cut()


class _Conversation:
    """One client, and its own connection to the server."""

    def __init__(
        self, proxy: AnsweringProxy, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._reader = reader
        self._writer = writer
        self._server: asyncio.StreamWriter | None = None
        self._replies = b""
        self._said = 0
        self._in_transaction = self._aborted = False

    def cut(self) -> None:
        for one in (self._writer, self._server):
            if one is not None:
                one.transport.abort()

    async def hold(self, host: str, port: int) -> None:
        if not await self._answers(Request((), self._number, 0, False)):
            return
        self._from_server, self._server = await asyncio.open_connection(host, port)
        requests: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue()
        both = [asyncio.create_task(self._listen(requests)), asyncio.create_task(self._answer_all(requests))]
        try:
            # Whichever side ends first ends the other: a client may go away while the server lets it wait.
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _listen(self, requests: asyncio.Queue[tuple[bytes, ...]]) -> None:
        parser = hiredis.Reader(notEnoughData=MISSING)
        while data := await self._reader.read(65536):
            parser.feed(data)
            while (words := parser.gets()) is not MISSING:
                requests.put_nowait(tuple(words))

    async def _answer_all(self, requests: asyncio.Queue[tuple[bytes, ...]]) -> None:
        while True:
            words = await requests.get()
            name = words[0].upper()
            if name == b"MULTI":
                self._in_transaction, self._aborted = True, False
            request = Request(words, self._number, self._said, self._in_transaction and name != b"MULTI")
            self._said += 1
            if not await self._answers(request):
                self.cut()
                return
            if name in LISTENING:
                while data := await self._from_server.read(65536):
                    self._writer.write(data)

    async def _answers(self, request: Request) -> bool:
        """Answers one request; false when the connection ends with it."""
        answer = self._proxy.choose(request)
        ends = request.name in (b"EXEC", b"DISCARD")
        if answer is None:
            if request.words:
                await self._pass_on(request, ends)
            return True
        self._proxy.answered += 1
        if answer.after_s:
            await asyncio.sleep(answer.after_s)
        if answer.forward and request.words:
            await self._ask(request.words)
        elif request.in_transaction:
            self._aborted = True
            if ends:
                await self._ask((b"DISCARD",))
        if ends:
            self._in_transaction = False
        self._writer.write(answer.text)
        if answer.cut:
            with suppress(OSError):
                await self._writer.drain()
        return not answer.cut

    async def _pass_on(self, request: Request, ends: bool) -> None:
        if request.name == b"EXEC" and self._aborted:
            await self._ask((b"DISCARD",))
            reply = ABORTED
        else:
            reply = await self._ask(request.words)
        if ends:
            self._in_transaction = False
        self._writer.write(reply)
        await self._writer.drain()

    async def _ask(self, words: tuple[bytes, ...]) -> bytes:
        """The server's reply to one command, as it came."""
        assert self._server is not None
        self._server.write(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub says one word
        while (end := reply_end(self._replies, 0)) is None:
            more = await self._from_server.read(65536)
            if not more:
                raise EOFError
            self._replies += more
        reply, self._replies = self._replies[:end], self._replies[end:]
        return reply


def reply_end(data: bytes, start: int) -> int | None:
    """Where the RESP2 reply that begins at ``start`` ends; None: more has to come."""
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
            following = reply_end(data, after)
            if following is None:
                return None
            after = following
    return after
