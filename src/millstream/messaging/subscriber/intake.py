"""What was received becomes messages in the book, and what left the book makes way for what waited behind it.

In: deliveries. Out: messages that may be started (``book.ready``), and outcomes for what can never be started.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.messaging.errors import DeliveriesExhausted, Undecodable
from millstream.messaging.failure import OF, is_for, unmarked
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Bury
from millstream.messaging.subscriber.topic import Topic
from millstream.model import Delivery, EntryId
from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)


def accept(topic: Topic, deliveries: Sequence[Delivery], valid_until: float) -> None:
    """New entries, and those whose time has come again."""
    book, decode, origin = topic.book, topic.codec.decode, topic.origin
    entries, ready, in_order = book.entries, book.ready, book.keeps_order
    count = size = 0
    for entry_id, fields, times in deliveries:
        if entry_id in entries:
            book.adopt(entry_id, times or 1, valid_until)
            continue
        assert fields is not None
        if OF in fields and not is_for(fields, to_bytes(topic.group)):
            _pass_over(topic, entry_id, fields, times or 1)
            continue
        try:
            message = decode(unmarked(fields))
            # ``Message.receive`` and ``Book.enter`` in plain stores: every call here is paid by every message.
            message._origin = origin
            message.id = entry_id
            message.times_delivered = times or 1
            message.fields = fields
            message.valid_until = valid_until
            if in_order:
                book.enter(message)
                continue
        except Exception as error:
            _bury_unreadable(topic, entry_id, fields, times or 1, error)
            continue
        message.weight = weight = len(message.payload)
        entries[entry_id] = message
        count += 1
        size += weight
        ready.append(message)
    book.grew(count, size)
    topic.weigh(count, size)
    if ready:
        topic.wake_workers()


def accept_taken(consumer: SharedConsumer, topic: Topic, deliveries: Sequence[Delivery], valid_until: float) -> None:
    """What a sweep took over, in its order, which a key's messages keep. What was handed back in good order is
    like new; the rest goes through probation."""
    for delivery in deliveries:
        entry_id, fields, times = delivery
        if not times:
            accept(topic, [delivery], valid_until)
            continue
        # Our sign of life was late; or others had it in between, and a handler here is at work on it still.
        if topic.book.adopt(entry_id, times, valid_until):
            continue
        assert fields is not None
        if OF in fields and not is_for(fields, to_bytes(topic.group)):
            _pass_over(topic, entry_id, fields, times)
            continue
        try:
            message = topic.codec.decode(unmarked(fields))
            topic.book.enter(message.receive(topic.origin, entry_id, times, fields, valid_until), suspect=True)
        except Exception as error:
            _bury_unreadable(topic, entry_id, fields, times, error)
    start_suspects(consumer, topic)


def start_suspects(consumer: SharedConsumer, topic: Topic) -> None:
    starts, exhausted = topic.book.next_suspects()
    for message in exhausted:
        message.settle(Bury(DeliveriesExhausted(message.times_delivered)))
    if starts:
        consumer.settler.charge(topic, starts)


def release(
    consumer: SharedConsumer, topic: Topic, ids: Iterable[EntryId], *, refused: Collection[object] = ()
) -> None:
    """The broker confirmed what became of these: they leave the book, and others move up.

    Where it ``refused`` some, they may have come to us anew since it was asked (a group that was made again): then
    they were in the book, and no second handler was begun. So we look under the own name, or nobody would handle them
    before they have been idle for long.
    """
    if topic.book.release(ids):
        start_suspects(consumer, topic)
    if refused:
        consumer.reader.look_again(topic)
    topic.changed()
    if topic.left_out and topic.book.room() > 0:
        consumer.reader.room_freed(topic)
    if topic.no_room:
        consumer.sweeper.visit(topic)
    if topic.book.ready:
        topic.wake_workers()


def start_again(topic: Topic, messages: Iterable[Message], times_delivered: int, valid_until: float) -> None:
    """One more start of the same entries, decoded afresh: the last handler may have changed its message. A suspect has
    met no handler here."""
    book, decode, origin = topic.book, topic.codec.decode, topic.origin
    for message in messages:
        assert message.id is not None
        assert message.fields is not None
        fresh = message if book.is_suspect(message) else decode(unmarked(message.fields))
        fresh.receive(origin, message.id, times_delivered, message.fields, valid_until)
        book.once_more(fresh, message.weight)
    topic.wake_workers()


def _pass_over(topic: Topic, entry_id: EntryId, fields: dict[bytes, bytes], times: int) -> None:
    """Another group's dead letter, sent round again: this group was done with it the first time."""
    message = Message(b"").receive(topic.origin, entry_id, times, fields)
    topic.book.hold(message)
    message.settle(ACKED)


def _bury_unreadable(topic: Topic, entry_id: EntryId, fields: dict[bytes, bytes], times: int, error: Exception) -> None:
    """Its codec, or the function that names its key, cannot make anything of it: no handler ever will."""
    if not isinstance(error, Undecodable):
        log.error("entry %s of %s cannot be made a message", entry_id, topic.name, exc_info=error)
    message = Message(b"").receive(topic.origin, entry_id, times, fields)
    topic.book.hold(message)
    message.settle(Bury(error))
