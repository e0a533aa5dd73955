"""Fanout (``group=None``): every subscriber receives every message, and no entry is ever pending.

For feature flags, caches and live views: every instance needs the messages from now on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import TYPE_CHECKING, Any

from millstream.broker.operations.info import stream_info
from millstream.broker.operations.streams import xadd_many, xrange, xread
from millstream.errors import NoSuchStream
from millstream.messaging import tracing
from millstream.messaging.codecs import Codec
from millstream.messaging.consumer.worker_pool import CANCEL_GRACE_S
from millstream.messaging.errors import NothingToSettle
from millstream.messaging.failure import is_for, report_failure, text_of, unmarked
from millstream.messaging.handler import Handler, callable_name, failure_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import Ack, Outcome, Retry
from millstream.messaging.partitions import OutputTopic, outputs_by_stream
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.supervision import is_worth_retrying
from millstream.model import MIN_ID, Backoff, Entry, EntryId, monotonic_ms

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

log = logging.getLogger(__name__)

FAILED = Backoff(initial_ms=50, max_ms=1_000)
REPLACED_CHECK_MS = 2_000
"""Interval between two checks whether an idle stream has smaller ids than those that were read."""
MAX_REMEMBERED_IDS = 1_000
"""Ids of the last entries read: where reading continues in a stream that lost its end in a failover."""


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
        self._seen: deque[EntryId] = deque(maxlen=MAX_REMEMBERED_IDS)
        """Ids that the stream has had, in the order in which they were read."""
        self._check_replaced_at_ms = 0.0
        self._closing = asyncio.Event()
        self._given_up = asyncio.Event()
        """``close`` does not wait for the handler any longer."""
        self._progress_ms = 0.0
        self.has_read = False
        self._handling: asyncio.Task[Any] | None = None

    def settle(self, message: Message, outcome: Outcome) -> None:
        """An acknowledgement needs no action. A retry or a rejection is refused, because the entry is not pending."""
        if not isinstance(outcome, Ack):
            raise NothingToSettle(message.uuid, "retry" if isinstance(outcome, Retry) else "dead-letter")

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
        """Nothing is in flight, so there is nothing to wait for."""

    async def close(self, timeout_s: float) -> None:
        """Stops reading. Waits up to ``timeout_s`` for the running handler, then cancels it and waits up to
        CANCEL_GRACE_S."""
        self._closing.set()
        handling = self._handling
        if handling is None:
            return
        await asyncio.wait([handling], timeout=timeout_s)
        if not handling.done():
            handling.cancel()
            await asyncio.wait([handling], timeout=CANCEL_GRACE_S)
        if not handling.done():
            log.warning("closing %s: a handler ignores its cancellation; it is not waited for", self.topic)
        self._given_up.set()

    async def consume(self, handler: Handler, publish_to: OutputTopic | None) -> None:
        """One message after the other. The failure of a handler is reported, and the next message follows."""
        # In a task of its own: ``close`` can leave a handler behind that ignores its cancellation.
        handling = self._handling = asyncio.create_task(
            self._consume(handler, publish_to), name=f"millstream handler of {self.topic}"
        )
        given_up = asyncio.create_task(self._given_up.wait(), name=f"millstream close of {self.topic}")
        try:
            await asyncio.wait([handling, given_up], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            handling.cancel()
            await asyncio.wait([handling], timeout=CANCEL_GRACE_S)
            raise
        finally:
            given_up.cancel()
        if handling.done() and not (handling.cancelled() and self._closing.is_set()):
            handling.result()

    async def _consume(self, handler: Handler, publish_to: OutputTopic | None) -> None:
        task = asyncio.current_task()
        while (message := await self.next_message()) is not None:
            try:
                await self._handle(message, handler, publish_to)
            except BaseException as error:  # see ``failure_of``
                failure = failure_of(error, task)
                if failure is None:
                    raise
                self._failed(message, handler, failure)

    async def _handle(self, message: Message, handler: Handler, publish_to: OutputTopic | None) -> None:
        output = await handler(message)
        if output is not None and publish_to is not None:
            outputs = (output,) if isinstance(output, Message) else output
            for stream, messages in outputs_by_stream(publish_to, outputs).items():
                await self._broker.run(xadd_many, stream, [self._codec.encode(message) for message in messages])
                if tracing.active is not None:
                    tracing.active.outputs_stored(stream, len(messages))
                self._broker.context.observer("messaging.outputs_published", topic=stream, messages=len(messages))

    def _failed(self, message: Message, handler: Handler, error: Exception) -> None:
        report_failure(message, callable_name(handler), error)
        self._emit(
            "messaging.handler_failed", id=str(message.id), error=text_of(error), error_type=type(error).__name__
        )

    async def next_message(self) -> Message | None:
        """The next message; None when closed."""
        while not self._closing.is_set():
            while self._read_ahead:
                entry = self._read_ahead.popleft()
                self._position = entry.id
                message = self._decoded(entry)
                if message is not None:
                    return message
            if self._position is None:
                self._position = await self._first_position()
            entries = await self._read(self._position)
            self._seen.extend(entry.id for entry in entries)
            self._read_ahead.extend(entries)
            if not entries and not self._closing.is_set():
                await self._check_replaced()
        return None

    async def _check_replaced(self) -> None:
        """Goes back if the stream's last id is smaller than an id that was read from it.

        The stream was deleted and created again with smaller ids, or a failover lost its end. XREAD would not return
        its entries before their ids exceed the position. Reading continues after the last known entry, else from the
        start.
        """
        if not self._seen or monotonic_ms() < self._check_replaced_at_ms:
            return
        self._check_replaced_at_ms = monotonic_ms() + REPLACED_CHECK_MS
        try:
            last_id = (await self._broker.run(stream_info, self.topic)).last_generated
            if last_id >= self._seen[-1]:
                return
            present = await self._broker.run(xrange, self.topic, self._seen[0], count=MAX_REMEMBERED_IDS)
        except NoSuchStream:
            return  # the stream may be created again, with smaller or larger ids
        except Exception as error:  # see ``is_worth_retrying``
            if not is_worth_retrying(error):
                raise
            self._emit("messaging.read_failed", error=text_of(error))
            return
        remaining = {entry.id for entry in present}.intersection(self._seen)
        self._position = max(remaining, default=MIN_ID)
        self._seen = deque(sorted(remaining), MAX_REMEMBERED_IDS)
        log.warning(
            "stream %s was replaced or lost its end: its last id %s is smaller than one that was read before; "
            "reading continues after %s",
            *(self.topic, last_id, self._position),
        )

    async def _first_position(self) -> EntryId:
        """Resolves "$" to an id once: sent with every read, it would skip entries that arrive between two reads."""
        if self._start != "$":
            return self._start if isinstance(self._start, EntryId) else EntryId.parse(self._start, argument="start")
        position = MIN_ID
        failures = 0
        while not self._closing.is_set():
            try:
                position = (await self._broker.run(stream_info, self.topic)).last_generated
                self._seen.append(position)
            except NoSuchStream:
                pass
            except Exception as error:  # see ``is_worth_retrying``
                if not is_worth_retrying(error):
                    raise
                self._emit("messaging.read_failed", error=text_of(error))
                failures += 1
                await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
                continue
            self._progress_ms = monotonic_ms()
            self.has_read = True
            break
        return position

    async def _read(self, position: EntryId) -> list[Entry]:
        """The next entries; none when closing. Reading is idempotent, so a failed read is repeated."""
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
                        self._emit("messaging.received", entries=len(entries))
                    return entries
            except Exception as error:  # see ``is_worth_retrying``
                if not is_worth_retrying(error):
                    raise
                self._emit("messaging.read_failed", error=text_of(error))
            finally:
                closing.cancel()
                read.cancel()
            self._progress_ms = 0.0
            failures += 1
            await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
        return []

    def _decoded(self, entry: Entry) -> Message | None:
        if not is_for(entry.fields, None):
            return None  # replayed for one group; this subscriber has received the original
        try:
            message = self._codec.decode(unmarked(entry.fields))
        except Exception as error:  # of any codec
            # Without a group it cannot be dead-lettered: it stays in the stream, and observers are notified.
            log.warning("entry %s of %s cannot be decoded: %s", entry.id, self.topic, error)
            self._emit("messaging.undecodable", id=str(entry.id), error=str(error))
            return None
        return message.receive(self, entry.id, 1, entry.fields)

    def _emit(self, name: str, **details: Any) -> None:
        self._broker.context.observer(name, topic=self.topic, **details)
