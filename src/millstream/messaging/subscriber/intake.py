"""What was received becomes messages in the book, and what left the book makes way for what waited behind it.

In: deliveries. Out: messages that may be started (``held.ready``), and outcomes for what can never be started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from millstream.messaging.burial import OF, is_for, unmarked
from millstream.messaging.errors import DeliveriesExhausted, Undecodable
from millstream.messaging.message import Message, Origin
from millstream.messaging.outcome import ACKED, Bury
from millstream.messaging.subscriber.desk import Desk
from millstream.model import Delivery, EntryId
from millstream.wire.names import to_bytes

log = logging.getLogger(__name__)


class Intake:
    def __init__(self, desk: Desk, origin: Origin, *, charge: Callable[[Message], None]) -> None:
        self._desk = desk
        self._origin = origin
        self._charge = charge
        self._group = to_bytes(desk.group)
        self._suspects: set[EntryId] = set()
        """Those that go through probation: until they are charged, nothing was counted for them."""

    def accept(self, deliveries: Sequence[Delivery], valid_until: float) -> int:
        """New entries, and those whose time has come again. Returns the bytes that they weigh."""
        desk = self._desk
        decode, origin, lanes = desk.codec.decode, self._origin, desk.lanes
        entries, ready = desk.held.entries, desk.held.ready
        size = 0
        for entry_id, fields, times in deliveries:
            if entry_id in entries:
                self._adopt(entries[entry_id], times or 1, valid_until)
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, self._group):
                self._pass_over(entry_id, fields, times or 1)
                continue
            try:
                message = decode(fields if OF not in fields else unmarked(fields))
                # ``Message.receive`` and ``Held.add`` in plain stores: every call here is paid by every message.
                message._origin = origin
                message.id = entry_id
                message.times_delivered = times or 1
                message.fields = fields
                message.valid_until = valid_until
                may_start = lanes is None or lanes.enter(message)
            except Exception as error:
                self._bury_unreadable(entry_id, fields, times or 1, error)
                continue
            message.weight = weight = len(message.payload)
            entries[entry_id] = message
            size += weight
            if may_start:
                ready.append(message)
        desk.held.weight += size
        if ready:
            desk.wake_workers()
        return size

    def accept_taken(self, deliveries: Sequence[Delivery], valid_until: float) -> None:
        """What a sweep took over, in its order, which a key's messages keep. What was handed back in good order is
        like new; the rest goes through probation."""
        desk = self._desk
        for delivery in deliveries:
            entry_id, fields, times = delivery
            if not times:
                self.accept([delivery], valid_until)
                continue
            if entry_id in desk.held.entries:
                # Our sign of life was late; or others had it in between, and a handler here is at work on it still.
                self._adopt(desk.held.entries[entry_id], times, valid_until)
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, self._group):
                self._pass_over(entry_id, fields, times)
                continue
            try:
                message = desk.codec.decode(unmarked(fields))
                message.receive(self._origin, entry_id, times, fields, valid_until)
                may_start = desk.lanes is None or desk.lanes.enter(message)
            except Exception as error:
                self._bury_unreadable(entry_id, fields, times, error)
                continue
            desk.held.add(message)
            self._suspects.add(entry_id)
            if may_start:
                self._start(message)
        self.next_suspect()

    def release(self, ids: Iterable[EntryId]) -> None:
        """The broker confirmed what became of these: they leave the book, and others move up."""
        desk = self._desk
        ids = list(ids)
        desk.held.drop(ids)
        if self._suspects:
            self._suspects.difference_update(ids)
        if desk.lost:
            desk.lost.difference_update(ids)
        if desk.lanes is not None:
            for entry_id in ids:
                following = desk.lanes.leave(entry_id)
                if following is not None:
                    self._start(following)
        if desk.probation:
            passed = [desk.probation.passed(entry_id) for entry_id in ids]
            if any(passed):
                self.next_suspect()
        desk.room_freed.set()
        if desk.held.ready:
            desk.wake_workers()

    def next_suspect(self) -> None:
        """Starts the next on probation, unless one is under way: charged first, so that a killer cannot dodge it."""
        desk = self._desk
        message = desk.probation.next()
        if message is None:
            return
        if message.times_delivered >= desk.settings.max_deliveries:
            message.settle(Bury(DeliveriesExhausted(message.times_delivered)))
        else:
            self._charge(message)

    def forget_unstarted(self) -> list[Message]:
        """Takes out of the book, and returns, all that no handler has seen."""
        desk = self._desk
        unstarted = unstarted_of(desk)
        ids = {message.id for message in unstarted if message.id is not None}
        desk.held.withdraw(ids)
        desk.probation.withdraw(ids)
        desk.held.drop(ids)
        if desk.lanes is not None:
            for entry_id in ids:
                desk.lanes.leave(entry_id)
        self._suspects -= ids
        return unstarted

    def is_suspect(self, message: Message) -> bool:
        return message.id in self._suspects

    def once_more(self, message: Message, times_delivered: int, valid_until: float) -> Message:
        """A message for one more start of the same entry, decoded afresh: the last handler may have changed it."""
        assert message.id is not None
        assert message.fields is not None
        self._suspects.discard(message.id)
        fresh = self._desk.codec.decode(unmarked(message.fields))
        fresh.receive(self._origin, message.id, times_delivered, message.fields, valid_until)
        fresh.weight = message.weight
        self._desk.held.entries[message.id] = fresh
        return fresh

    def _start(self, message: Message) -> None:
        if message.id in self._suspects:
            self._desk.probation.add(message)
            self.next_suspect()
        else:
            self._desk.held.ready.append(message)

    def _adopt(self, message: Message, times: int, valid_until: float) -> None:
        # The entry came to us again while a handler is at work on it: the group was moved back, or others lost it too.
        # One handler at a time is enough. With the new count its acknowledgement is accepted.
        message.times_delivered = times
        message.valid_until = valid_until
        if message.id is not None:
            self._desk.lost.discard(message.id)

    def _pass_over(self, entry_id: EntryId, fields: dict[bytes, bytes], times: int) -> None:
        """Another group's dead letter, sent round again: this group was done with it the first time."""
        message = Message(b"").receive(self._origin, entry_id, times, fields)
        self._desk.held.add(message)
        message.settle(ACKED)

    def _bury_unreadable(self, entry_id: EntryId, fields: dict[bytes, bytes], times: int, error: Exception) -> None:
        """Its codec, or the function that names its key, cannot make anything of it: no handler ever will."""
        if not isinstance(error, Undecodable):
            log.error("entry %s of %s cannot be made a message", entry_id, self._desk.topic, exc_info=error)
        message = Message(b"").receive(self._origin, entry_id, times, fields)
        self._desk.held.add(message)
        message.settle(Bury(error))


def unstarted_of(desk: Desk) -> list[Message]:
    lanes = desk.lanes.waiting() if desk.lanes is not None else []
    return [*desk.held.ready, *desk.held.doubtful, *desk.probation.waiting(), *lanes]
