"""Messages to everybody: each subscriber reads the stream by itself, and nothing is ever pending.

For feature flags, caches and live views: what matters is what happens from now on, in every instance.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import TYPE_CHECKING, Any

from millstream.broker import stream_info, xadd_many, xread
from millstream.errors import NoSuchStream
from millstream.messaging.codecs import Codec
from millstream.messaging.errors import NothingToSettle
from millstream.messaging.failure import is_for, report_failure, text_of, unmarked
from millstream.messaging.handler import Handler, callable_name, failure_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import Ack, Outcome, Retry
from millstream.messaging.partitions import OutputTopic, outputs_by_stream
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.supervision import can_pass
from millstream.model import MIN_ID, Backoff, Entry, EntryId, monotonic_ms

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

log = logging.getLogger(__name__)

FAILED = Backoff(initial_ms=50, max_ms=1_000)


class Fanout:
    """Made and run by Subscriber. It is the ``Origin`` of its messages."""

    group: str | None = None
    consumer: str | None = None

    def __init__(
        self, broker: BrokerProtocol, topic: str, settings: SubscriberSettings, codec: Codec, start: EntryId | str
    ) -> None:
        self.topic = topic
        self.abandoned = False
        self._broker = broker
        self._settings = settings
        self._codec = codec
        self._start = start
        self._position: EntryId | None = None
        self._read_ahead: deque[Entry] = deque()
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._progress_ms = 0.0
        self.has_read = False
        self._handling: asyncio.Task[Any] | None = None

    def settle(self, message: Message, outcome: Outcome) -> None:
        """An acknowledgement has nothing to do here; bringing a message back cannot be promised, so it is refused."""
        if not isinstance(outcome, Ack):
            raise NothingToSettle(message.uuid, "retry" if isinstance(outcome, Retry) else "bury")

    @property
    def ready(self) -> bool:
        patience = self._settings.read_block_ms + self._settings.grace_ms
        return not self._closing.is_set() and monotonic_ms() - self._progress_ms <= patience

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def handles_here(self) -> bool:
        return self._handling is not None and self._handling is asyncio.current_task()

    async def ended(self) -> None:
        """Nothing is held here: there is nothing to wait for."""

    async def close(self, timeout_s: float) -> None:
        """Reads no more. Waits until the handler that is under way has ended, or ``timeout_s``."""
        self._closing.set()
        if self._handling is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            pass

    async def consume(self, handler: Handler, publish_to: OutputTopic | None) -> None:
        """One message after the other. A handler that fails is told about, and the next message comes."""
        task = self._handling = asyncio.current_task()
        try:
            while (message := await self.next_message()) is not None:
                try:
                    await self._handle(message, handler, publish_to)
                except BaseException as error:
                    failure = failure_of(error, task)
                    if failure is None:
                        raise
                    self._failed(message, handler, failure)
        finally:
            self._ended.set()

    async def _handle(self, message: Message, handler: Handler, publish_to: OutputTopic | None) -> None:
        output = await handler(message)
        if output is not None and publish_to is not None:
            outputs = (output,) if isinstance(output, Message) else output
            for stream, some in outputs_by_stream(publish_to, outputs).items():
                await self._broker.run(xadd_many, stream, [self._codec.encode(one) for one in some])
                self._broker.context.observer("messaging.outputs_published", topic=stream, messages=len(some))

    def _failed(self, message: Message, handler: Handler, error: Exception) -> None:
        report_failure(message, callable_name(handler), error)
        self._tell(
            "messaging.handler_failed", id=str(message.id), error=text_of(error), error_type=type(error).__name__
        )

    async def next_message(self) -> Message | None:
        """The next one; None when closed."""
        try:
            while not self._closing.is_set():
                while self._read_ahead:
                    entry = self._read_ahead.popleft()
                    self._position = entry.id
                    message = self._decoded(entry)
                    if message is not None:
                        return message
                if self._position is None:
                    self._position = await self._first_position()
                self._read_ahead.extend(await self._read(self._position))
        except BaseException:
            self._ended.set()
            raise
        self._ended.set()
        return None

    async def _first_position(self) -> EntryId:
        """ "$" is made a real id once: asked anew with every read, it would skip what came in between."""
        if self._start != "$":
            return self._start if isinstance(self._start, EntryId) else EntryId.parse(self._start, argument="start")
        position = MIN_ID
        failures = 0
        while not self._closing.is_set():
            try:
                position = (await self._broker.run(stream_info, self.topic)).last_generated
            except NoSuchStream:
                pass
            except Exception as error:
                if not can_pass(error):
                    raise
                self._tell("messaging.read_failed", error=text_of(error))
                failures += 1
                await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
                continue
            self._progress_ms = monotonic_ms()
            self.has_read = True
            break
        return position

    async def _read(self, position: EntryId) -> list[Entry]:
        """The next entries; nothing when closing. Reading is idempotent: whatever fails is asked again."""
        failures = 0
        while not self._closing.is_set():
            read = asyncio.ensure_future(
                self._broker.run(
                    xread, {self.topic: position}, count=self._settings.count, block_ms=self._settings.read_block_ms
                )
            )
            closing = asyncio.ensure_future(self._closing.wait())
            patience = (self._settings.read_block_ms + self._settings.grace_ms) / 1000
            try:
                await asyncio.wait({read, closing}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if read.done():
                    entries = read.result().get(self.topic, [])
                    self._progress_ms = monotonic_ms()
                    self.has_read = True
                    if entries:
                        self._tell("messaging.received", entries=len(entries))
                    return entries
            except Exception as error:
                if not can_pass(error):
                    raise
                self._tell("messaging.read_failed", error=text_of(error))
            finally:
                closing.cancel()
                read.cancel()
            self._progress_ms = 0.0
            failures += 1
            await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
        return []

    def _decoded(self, entry: Entry) -> Message | None:
        if not is_for(entry.fields, None):
            return None  # replayed for one group alone; here it was seen the first time
        try:
            message = self._codec.decode(unmarked(entry.fields))
        except Exception as error:
            # Nobody holds it, so nobody can bury it: it stays in the stream, and the observer is told.
            log.warning("entry %s of %s cannot be decoded: %s", entry.id, self.topic, error)
            self._tell("messaging.undecodable", id=str(entry.id), error=str(error))
            return None
        return message.receive(self, entry.id, 1, entry.fields)

    def _tell(self, name: str, **facts: Any) -> None:
        self._broker.context.observer(name, topic=self.topic, **facts)
