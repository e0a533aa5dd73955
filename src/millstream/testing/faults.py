"""Faults between a program and its broker: transports that fail on request, and TCP proxies that break connections, in
the middle of a reply or at any byte in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from millstream.broker import BlockingListener, BlockingTransport, Listener, Transport
from millstream.errors import BrokerUnavailable
from millstream.wire import Args, Batch, Command


class Fault(NamedTuple):
    """The fault of one call."""

    before: Exception | None = None
    """Raised without executing the command."""
    after: Exception | None = None
    """Raised after executing the command: the reply is lost."""
    delay_s: float = 0.0

    @classmethod
    def refused(cls) -> Fault:
        """The connection is refused, and nothing is executed."""
        return cls(before=BrokerUnavailable("planted: connection refused"))

    @classmethod
    def answer_lost(cls) -> Fault:
        """The command is executed, and the connection breaks before the reply."""
        return cls(after=BrokerUnavailable("planted: connection reset", may_have_been_applied=True))


NO_FAULT = Fault()
Choice = Callable[[Command | Batch], Fault | None]


class _Plan:
    """Faults in order of the requests (a list), or chosen by a function of the request."""

    def __init__(self, faults: Iterable[Fault | None] | Choice) -> None:
        self._choose: Choice | None = faults if callable(faults) else None
        self._queue: deque[Fault | None] = deque() if callable(faults) else deque(faults)
        self.requests: list[Command | Batch] = []
        """All requests, in order."""

    def next(self, request: Command | Batch) -> Fault:
        self.requests.append(request)
        if self._choose is not None:
            return self._choose(request) or NO_FAULT
        return (self._queue.popleft() if self._queue else None) or NO_FAULT


class FaultyTransport:
    """``broker.transport = FaultyTransport(broker.transport, [None, Fault.refused()])``: the second call fails."""

    def __init__(self, transport: Transport, faults: Iterable[Fault | None] | Choice = ()) -> None:
        self._transport = transport
        self.now: Callable[[Args], Any] | None = None
        self.features = transport.features
        self.plan = _Plan(faults)

    async def call(self, command: Command) -> Any:
        fault = await self._before(command)
        return _after(fault, await self._transport.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        fault = await self._before(batch)
        replies: list[Any] = _after(fault, await self._transport.call_many(batch))
        return replies

    async def _before(self, request: Command | Batch) -> Fault:
        fault = self.plan.next(request)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.before is not None:
            raise fault.before
        return fault

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        return self._transport.listen(patterns)

    async def close(self) -> None:
        await self._transport.close()


class FaultyBlockingTransport:
    """``FaultyTransport`` for a blocking broker."""

    def __init__(self, transport: BlockingTransport, faults: Iterable[Fault | None] | Choice = ()) -> None:
        self._transport = transport
        self.features = transport.features
        self.now: Callable[[Args], Any] | None = None
        self.plan = _Plan(faults)

    def call(self, command: Command) -> Any:
        fault = self._before(command)
        return _after(fault, self._transport.call(command))

    def call_many(self, batch: Batch) -> list[Any]:
        fault = self._before(batch)
        replies: list[Any] = _after(fault, self._transport.call_many(batch))
        return replies

    def _before(self, request: Command | Batch) -> Fault:
        fault = self.plan.next(request)
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.before is not None:
            raise fault.before
        return fault

    def listen(self, patterns: Sequence[bytes]) -> BlockingListener:
        return self._transport.listen(patterns)

    def close(self) -> None:
        self._transport.close()


def _after(fault: Fault, reply: Any) -> Any:
    if fault.after is not None:
        raise fault.after
    return reply


class CuttingProxy:
    """``async with CuttingProxy(port) as proxy``: clients connect to ``proxy.url``.

    With probability ``chance`` the connection is cut at each piece of a reply, of which only a part is delivered.
    ``cuts`` counts the cuts. The same seed makes the same choices, as far as network timing allows. While ``closed`` is
    true, new connections are refused. ``listen`` is the address of the proxy; port 0 selects a free port.
    """

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        listen: tuple[str, int] = ("127.0.0.1", 0),
        chance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._host = host
        self._port = port
        self._listen = listen
        self.chance = chance
        self.cuts = 0
        self.closed = False
        self._random = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://{self._listen[0]}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, *self._listen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        """Aborts all open connections, like a crash."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if self.closed:
                raise ConnectionRefusedError("closed")
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        try:
            await asyncio.gather(
                self._forward(reader, server_writer, may_cut=False), self._forward(server_reader, writer, may_cut=True)
            )
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for either in (writer, server_writer):
                self._writers.discard(either)
                either.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_cut: bool) -> None:
        while piece := await reader.read(65536):
            if may_cut and self.chance and self._random.random() < self.chance:
                self.cuts += 1
                writer.write(piece[: self._random.randrange(len(piece))])
                await writer.drain()
                raise ConnectionResetError("planted")
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError("the other side closed")


class FragileProxy:
    """Forwards to ``port``. Each connection is reset after a random number of bytes up to ``max_bytes``.

    ``seed`` makes these numbers repeatable, but not the data in transit at the reset.
    """

    def __init__(self, port: int, *, max_bytes: int | None = None, seed: int = 0) -> None:
        self._target = port
        self._max_bytes = max_bytes
        self._random = random.Random(seed)  # noqa: S311  # chance, not secrecy
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._max_bytes = None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def heal(self) -> None:
        """Stops cutting new connections."""
        self._max_bytes = None

    def cut_all(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._cut(pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            pair = (client, server)
            budget = _Budget(self._random.randint(1, self._max_bytes) if self._max_bytes else None)
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._forward, args=(pair, source, sink, budget), daemon=True).start()

    def _forward(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket, budget: _Budget
    ) -> None:
        try:
            while data := source.recv(65536):
                allowed = budget.spend(len(data))
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    self.cuts += 1
                    break
        except OSError:
            pass
        self._cut(pair)

    def _cut(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for sock in pair:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class _Budget:
    """The bytes that a connection may still transfer, in both directions together."""

    def __init__(self, remaining: int | None) -> None:
        self._remaining = remaining
        self._lock = threading.Lock()

    def spend(self, count: int) -> int:
        if self._remaining is None:
            return count
        with self._lock:
            allowed = min(count, self._remaining)
            self._remaining -= allowed
            return allowed
