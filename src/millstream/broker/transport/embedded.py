"""Transports to the engine in this process, for event loops and for threads: no socket, no copy, and no task switch
unless a command waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from millstream.broker.context import Limits
from millstream.broker.embedded import Embedded
from millstream.broker.failures import typed_error
from millstream.broker.transport.interface import Features
from millstream.broker.transport.listeners import message_of
from millstream.broker.transport.local_address import Handle, LocalAddress
from millstream.engine import Session
from millstream.engine.session import BLOCKED
from millstream.errors import BrokerClosed
from millstream.model import Clock, Observer, quiet
from millstream.wire import Args, Batch, Command, ErrorReply

TICK_MARGIN_S = 0.002
"""The engine's clock has whole milliseconds: a tick slightly later than the time-out finds it expired."""


class _EngineClient(NamedTuple):
    """An embedded broker, the transport's session for commands that do not wait, and the function that executes
    them.
    """

    embedded: Embedded
    session: Session
    now: Callable[[Args], Any]

    def send(self, batch: Batch) -> list[Any]:
        replies = self.embedded.execute_many(self.session, batch.commands, atomic=batch.atomic)
        if batch.after is not None:
            replies.append(self.embedded.execute(self.session, batch.after))
        return batch.read(replies)


class _TransportBase:
    """Common parts of both transports: thread-safe, opened on first use. In a forked child it raises BrokerClosed."""

    def __init__(self, address: LocalAddress, clock: Clock, limits: Limits, observer: Observer) -> None:
        self._handle = Handle(address, clock)
        self._address = address
        self._clock = clock
        self.features = Features(embedded=True, survives_restart=self._handle.durable)
        self._limits = limits
        self._observer = observer
        self._client: _EngineClient | None = None
        self.now: Callable[[Args], Any] | None = None

    def _set_client(self, embedded: Embedded, session: Session) -> _EngineClient:
        self.now = embedded.immediate_executor(session)
        self._client = _EngineClient(embedded, session, self.now)
        return self._client


class EmbeddedTransport(_TransportBase):
    """The transport for any number of event loops."""

    def __init__(self, address: LocalAddress, clock: Clock, limits: Limits, observer: Observer) -> None:
        super().__init__(address, clock, limits, observer)
        self._waiting: set[_Waiter] = set()

    async def call(self, command: Command) -> Any:
        client = self._client or await self._open()
        if command.block_ms is not None:
            return await self._wait(client.embedded, command)
        return client.now(command.args)

    async def call_many(self, batch: Batch) -> list[Any]:
        return (self._client or await self._open()).send(batch)

    async def _open(self) -> _EngineClient:
        # Reading a journal takes time, so it must not block the event loop.
        opened = await asyncio.to_thread(self._handle.open) if self._handle.durable else self._handle.open()
        if self._handle.closed:
            raise BrokerClosed("this broker was closed while it was being opened.")
        return self._set_client(*opened)

    async def _wait(self, embedded: Embedded, command: Command) -> Any:
        """Runs a blocking command. If it is cancelled, entries that were delivered at the same moment stay pending, as
        on Redis.
        """
        waiter = _Waiter()
        session = embedded.session(waiter.deliver)
        self._waiting.add(waiter)
        timer: asyncio.TimerHandle | None = None
        try:
            if command.on_wait is not None:
                command.on_wait(embedded.execute(session, (b"CLIENT", b"ID")))
            reply = embedded.execute(session, command.args)
            if reply is BLOCKED:
                if command.block_ms:
                    timer = waiter.loop.call_later(command.block_ms / 1000 + TICK_MARGIN_S, embedded.tick)
                reply = await waiter.future
        finally:
            self._waiting.discard(waiter)
            if timer is not None:
                timer.cancel()
            if not embedded.closed:
                embedded.drop(session)
        if type(reply) is ErrorReply:
            raise typed_error(reply)
        return reply

    def listen(self, patterns: Sequence[bytes]) -> EngineListener:
        return EngineListener(self, patterns, self._limits, self._observer)

    async def opened(self) -> Embedded:
        return (self._client or await self._open()).embedded

    def blocking(self) -> BlockingEmbeddedTransport:
        """Another transport to the same embedded broker, for a thread."""
        return BlockingEmbeddedTransport(self._address, self._clock, self._limits, quiet)

    async def close(self) -> None:
        self._client = self.now = None
        for waiter in list(self._waiting):
            waiter.fail(BrokerClosed("this broker was closed while the call was waiting."))
        self._handle.close()


class _Waiter:
    """A future that any thread may complete."""

    __slots__ = ("_thread", "future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self._thread = threading.get_ident()

    def deliver(self, reply: Any) -> None:
        if threading.get_ident() == self._thread:
            self._settle(reply)
        else:
            self._call_in_loop(self._settle, reply)

    def _settle(self, reply: Any) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: Exception) -> None:
        self._call_in_loop(self._set_exception, error)

    def _set_exception(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # retrieved: asyncio must not log the error of a listener that no task reads

    def _call_in_loop(self, callback: Any, value: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            pass  # the loop was closed, and its tasks with it


class _Subscription:
    """Common parts of both listeners: a session that subscribes on first use and is dropped at the end."""

    def __init__(self, patterns: Sequence[bytes], deliver: Callable[[Any], None]) -> None:
        self._patterns = patterns
        self._deliver = deliver
        self._embedded: Embedded | None = None
        self._session: Session | None = None

    @property
    def is_active(self) -> bool:
        return self._session is not None

    def start(self, embedded: Embedded) -> None:
        self._embedded, self._session = embedded, embedded.session(self._deliver)
        reply = embedded.execute(self._session, (b"PSUBSCRIBE", *self._patterns))
        if type(reply) is ErrorReply:
            raise typed_error(reply)

    def drop(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._embedded is not None and not self._embedded.closed:
            self._embedded.drop(session)


class EngineListener:
    """A subscription for event loops; it starts on first use."""

    def __init__(
        self, transport: EmbeddedTransport, patterns: Sequence[bytes], limits: Limits, observer: Observer
    ) -> None:
        self._transport = transport
        self._observer = observer
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=limits.listen_backlog)
        self._waiter: _Waiter | None = None
        self._subscription = _Subscription(patterns, self._deliver)

    async def __aenter__(self) -> EngineListener:
        await self._subscribe()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._subscription.drop()

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bytes]]:
        try:
            await self._subscribe()
            while True:
                # Create the waiter before reading the messages: a message that arrives in between completes the waiter.
                waiter = self._waiter = _Waiter()
                self._transport._waiting.add(waiter)
                try:
                    while self._messages:
                        yield self._messages.popleft()
                    await waiter.future
                finally:
                    self._transport._waiting.discard(waiter)
        finally:
            self._subscription.drop()

    async def _subscribe(self) -> None:
        if not self._subscription.is_active:
            self._subscription.start(await self._transport.opened())

    def _deliver(self, reply: Any) -> None:
        message = message_of(reply)
        if message is None:
            return
        if len(self._messages) == self._messages.maxlen:
            self._observer("broker.listener_overflow", dropped=1)
        self._messages.append(message)
        if self._waiter is not None:
            self._waiter.deliver(None)


class BlockingEmbeddedTransport(_TransportBase):
    """The transport for threads."""

    def __init__(self, address: LocalAddress, clock: Clock, limits: Limits, observer: Observer) -> None:
        super().__init__(address, clock, limits, observer)
        self.waiting: set[SimpleQueue[Any]] = set()

    def call(self, command: Command) -> Any:
        client = self._client or self._open()
        if command.block_ms is not None:
            return self._wait(client.embedded, command)
        return client.now(command.args)

    def call_many(self, batch: Batch) -> list[Any]:
        return (self._client or self._open()).send(batch)

    def _open(self) -> _EngineClient:
        return self._set_client(*self._handle.open())

    def opened(self) -> Embedded:
        return (self._client or self._open()).embedded

    def _wait(self, embedded: Embedded, command: Command) -> Any:
        replies: SimpleQueue[Any] = SimpleQueue()
        session = embedded.session(replies.put)
        self.waiting.add(replies)
        try:
            reply = embedded.execute(session, command.args)
            if reply is BLOCKED:
                reply = _next_reply(replies, embedded, command.block_ms)
        finally:
            self.waiting.discard(replies)
            if not embedded.closed:
                embedded.drop(session)
        if isinstance(reply, BrokerClosed):
            raise reply
        if type(reply) is ErrorReply:
            raise typed_error(reply)
        return reply

    def listen(self, patterns: Sequence[bytes]) -> BlockingEngineListener:
        return BlockingEngineListener(self, patterns, self._limits, self._observer)

    def close(self) -> None:
        self._client = self.now = None
        for replies in list(self.waiting):
            replies.put(BrokerClosed("this broker was closed while the call was waiting."))
        self._handle.close()


def _next_reply(replies: SimpleQueue[Any], embedded: Embedded, block_ms: int | None) -> Any:
    """The reply of a blocked session. After its time-out the engine is ticked, so that it ends the wait."""
    if block_ms:
        try:
            return replies.get(timeout=block_ms / 1000 + TICK_MARGIN_S)
        except Empty:
            embedded.tick()
    return replies.get()


class BlockingEngineListener:
    """A subscription for threads; it starts on first use."""

    def __init__(
        self, transport: BlockingEmbeddedTransport, patterns: Sequence[bytes], limits: Limits, observer: Observer
    ) -> None:
        self._transport = transport
        self._backlog = limits.listen_backlog
        self._observer = observer
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._subscription = _Subscription(patterns, self._deliver)

    def __enter__(self) -> BlockingEngineListener:
        self._subscribe()
        return self

    def __exit__(self, *exc: object) -> None:
        self._subscription.drop()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        self._subscribe()
        self._transport.waiting.add(self._messages)
        try:
            while True:
                reply = self._messages.get()
                if isinstance(reply, BrokerClosed):
                    raise reply
                yield reply
        finally:
            self._transport.waiting.discard(self._messages)
            self._subscription.drop()

    def _subscribe(self) -> None:
        if not self._subscription.is_active:
            self._subscription.start(self._transport.opened())

    def _deliver(self, reply: Any) -> None:
        message = message_of(reply)
        if message is None:
            return
        if self._messages.qsize() >= self._backlog:
            self._messages.get_nowait()
            self._observer("broker.listener_overflow", dropped=1)
        self._messages.put(message)
