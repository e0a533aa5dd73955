"""The link to the engine in this process, for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from millstream.broker.embedded import Embedded
from millstream.broker.failures import typed
from millstream.broker.limits import Limits
from millstream.broker.links.link import Features
from millstream.broker.links.local import Handle, LocalAddress, answering
from millstream.broker.links.subscriptions import message_of
from millstream.engine import BLOCKED, Session
from millstream.errors import BrokerClosed
from millstream.model.clock import Clock
from millstream.model.observer import Observer
from millstream.wire.commands import Batch, Command
from millstream.wire.replies import ErrorReply

TICK_MARGIN_S = 0.002


class BlockingEngineLink:
    """Thread-safe. A forked child is told to open its own."""

    def __init__(self, address: LocalAddress, clock: Clock, limits: Limits, observer: Observer) -> None:
        self._handle = Handle(address, clock)
        self.features = Features(embedded=True, survives_restart=self._handle.durable)
        self._limits = limits
        self._observer = observer
        self._embedded: Embedded | None = None
        self._session: Session | None = None
        self.now: Callable[[Command], Any] | None = None
        self.waiting: set[SimpleQueue[Any]] = set()

    def call(self, command: Command) -> Any:
        embedded = self._embedded
        if embedded is None:
            embedded = self.opened()
        if command.block_ms is not None:
            return self._wait(embedded, command)
        reply = embedded.execute(self._session, command.args)  # type: ignore[arg-type]  # set together with embedded
        if type(reply) is ErrorReply:
            raise typed(reply)
        return reply

    def call_many(self, batch: Batch) -> list[Any]:
        embedded = self.opened()
        session = self._session
        assert session is not None
        replies = embedded.execute_many(session, batch.commands, atomic=batch.atomic)
        if batch.after is not None:
            replies.append(embedded.execute(session, batch.after))
        return batch.read(replies)

    def opened(self) -> Embedded:
        if self._embedded is None:
            self._embedded, self._session = opened = self._handle.open()
            self.now = answering(*opened)
        return self._embedded

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
        self._embedded = self._session = self.now = None
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
        self._patterns = patterns
        self._backlog = limits.listen_backlog
        self._observer = observer
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._embedded: Embedded | None = None
        self._session: Session | None = None

    def __enter__(self) -> BlockingEngineListener:
        self._subscribe()
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()

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
            self._drop()

    def _subscribe(self) -> None:
        if self._session is not None:
            return
        self._embedded = self._link.opened()
        self._session = self._embedded.session(self._deliver)
        reply = self._embedded.execute(self._session, (b"PSUBSCRIBE", *self._patterns))
        if type(reply) is ErrorReply:
            raise typed(reply)

    def _deliver(self, reply: Any) -> None:
        message = message_of(reply)
        if message is None:
            return
        if self._messages.qsize() >= self._backlog:
            self._messages.get_nowait()
            self._observer("broker.listener_overflow", dropped=1)
        self._messages.put(message)

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._embedded is not None and not self._embedded.closed:
            self._embedded.drop(session)
