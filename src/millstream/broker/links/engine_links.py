"""The links to the engine in this process, for event loops and for threads: no socket, no copy, no task switch where
nothing waits.
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
from millstream.broker.failures import typed
from millstream.broker.links.link import Features
from millstream.broker.links.listeners import message_of
from millstream.broker.links.local import Handle, LocalAddress
from millstream.engine import BLOCKED, Session
from millstream.errors import BrokerClosed
from millstream.model import Clock, Observer
from millstream.wire import Args, Batch, Command, ErrorReply

TICK_MARGIN_S = 0.002
"""The engine's clock counts whole milliseconds: a tick that comes a little late finds the wait over."""


class _EngineClient(NamedTuple):
    """An embedded broker, a link's session there for what does not wait, and the shortest way to ask it."""

    embedded: Embedded
    session: Session
    now: Callable[[Args], Any]

    def send(self, batch: Batch) -> list[Any]:
        replies = self.embedded.execute_many(self.session, batch.commands, atomic=batch.atomic)
        if batch.after is not None:
            replies.append(self.embedded.execute(self.session, batch.after))
        return batch.read(replies)


class _LinkToEngine:
    """What both links are made of: thread-safe, opened on first use. A forked child is told to open its own."""

    def __init__(self, address: LocalAddress, clock: Clock, limits: Limits, observer: Observer) -> None:
        self._handle = Handle(address, clock)
        self.features = Features(embedded=True, survives_restart=self._handle.durable)
        self._limits = limits
        self._observer = observer
        self._client: _EngineClient | None = None
        self.now: Callable[[Args], Any] | None = None

    def _take(self, embedded: Embedded, session: Session) -> _EngineClient:
        self.now = embedded.answering(session)
        self._client = _EngineClient(embedded, session, self.now)
        return self._client


class EngineLink(_LinkToEngine):
    """For any number of loops."""

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
        # Reading a journal takes a while: not on the loop's time.
        found = await asyncio.to_thread(self._handle.open) if self._handle.durable else self._handle.open()
        if self._handle.closed:
            raise BrokerClosed("this broker was closed while it was being opened.")
        return self._take(*found)

    async def _wait(self, embedded: Embedded, command: Command) -> Any:
        """Cancelled, it leaves nothing behind; what was handed to it in the same moment is pending, as on Redis."""
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
            raise typed(reply)
        return reply

    def listen(self, patterns: Sequence[bytes]) -> EngineListener:
        return EngineListener(self, patterns, self._limits, self._observer)

    async def opened(self) -> Embedded:
        return (self._client or await self._open()).embedded

    async def close(self) -> None:
        self._client = self.now = None
        for waiter in list(self._waiting):
            waiter.give_up(BrokerClosed("this broker was closed while the call was waiting."))
        self._handle.close()


class _Waiter:
    """A future that any thread may settle."""

    __slots__ = ("_thread", "future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self._thread = threading.get_ident()

    def deliver(self, reply: Any) -> None:
        if threading.get_ident() == self._thread:
            self._settle(reply)
        else:
            self._from_afar(self._settle, reply)

    def _settle(self, reply: Any) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def give_up(self, error: Exception) -> None:
        self._from_afar(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # seen: a listener that nobody reads any more must not be reported

    def _from_afar(self, step: Any, value: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(step, value)
        except RuntimeError:
            pass  # that loop was closed, and with it whoever waited


class _Subscription:
    """What both listeners are made of: a session that has subscribed, from first use until it is dropped."""

    def __init__(self, patterns: Sequence[bytes], deliver: Callable[[Any], None]) -> None:
        self._patterns = patterns
        self._deliver = deliver
        self._embedded: Embedded | None = None
        self._session: Session | None = None

    @property
    def begun(self) -> bool:
        return self._session is not None

    def begin(self, embedded: Embedded) -> None:
        self._embedded, self._session = embedded, embedded.session(self._deliver)
        reply = embedded.execute(self._session, (b"PSUBSCRIBE", *self._patterns))
        if type(reply) is ErrorReply:
            raise typed(reply)

    def drop(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._embedded is not None and not self._embedded.closed:
            self._embedded.drop(session)


class EngineListener:
    """Subscribes on first use."""

    def __init__(self, link: EngineLink, patterns: Sequence[bytes], limits: Limits, observer: Observer) -> None:
        self._link = link
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
                # A fresh waiter first, then a look: what comes in between settles the waiter.
                waiter = self._waiter = _Waiter()
                self._link._waiting.add(waiter)
                try:
                    while self._messages:
                        yield self._messages.popleft()
                    await waiter.future
                finally:
                    self._link._waiting.discard(waiter)
        finally:
            self._subscription.drop()

    async def _subscribe(self) -> None:
        if not self._subscription.begun:
            self._subscription.begin(await self._link.opened())

    def _deliver(self, reply: Any) -> None:
        message = message_of(reply)
        if message is None:
            return
        if len(self._messages) == self._messages.maxlen:
            self._observer("broker.listener_overflow", dropped=1)
        self._messages.append(message)
        if self._waiter is not None:
            self._waiter.deliver(None)


class BlockingEngineLink(_LinkToEngine):
    """For threads."""

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
        return self._take(*self._handle.open())

    def opened(self) -> Embedded:
        return (self._client or self._open()).embedded

    def _wait(self, embedded: Embedded, command: Command) -> Any:
        answers: SimpleQueue[Any] = SimpleQueue()
        session = embedded.session(answers.put)
        self.waiting.add(answers)
        try:
            reply = embedded.execute(session, command.args)
            if reply is BLOCKED:
                reply = _next(answers, embedded, command.block_ms)
        finally:
            self.waiting.discard(answers)
            if not embedded.closed:
                embedded.drop(session)
        if isinstance(reply, BrokerClosed):
            raise reply
        if type(reply) is ErrorReply:
            raise typed(reply)
        return reply

    def listen(self, patterns: Sequence[bytes]) -> BlockingEngineListener:
        return BlockingEngineListener(self, patterns, self._limits, self._observer)

    def close(self) -> None:
        self._client = self.now = None
        for answers in list(self.waiting):
            answers.put(BrokerClosed("this broker was closed while the call was waiting."))
        self._handle.close()


def _next(answers: SimpleQueue[Any], embedded: Embedded, block_ms: int | None) -> Any:
    """The answer of a blocked session; when its time is over the engine is told to look at its clock."""
    if block_ms:
        try:
            return answers.get(timeout=block_ms / 1000 + TICK_MARGIN_S)
        except Empty:
            embedded.tick()
    return answers.get()


class BlockingEngineListener:
    """Subscribes on first use."""

    def __init__(self, link: BlockingEngineLink, patterns: Sequence[bytes], limits: Limits, observer: Observer) -> None:
        self._link = link
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
        self._link.waiting.add(self._messages)
        try:
            while True:
                reply = self._messages.get()
                if isinstance(reply, BrokerClosed):
                    raise reply
                yield reply
        finally:
            self._link.waiting.discard(self._messages)
            self._subscription.drop()

    def _subscribe(self) -> None:
        if not self._subscription.begun:
            self._subscription.begin(self._link.opened())

    def _deliver(self, reply: Any) -> None:
        message = message_of(reply)
        if message is None:
            return
        if self._messages.qsize() >= self._backlog:
            self._messages.get_nowait()
            self._observer("broker.listener_overflow", dropped=1)
        self._messages.put(message)
