"""The book of one stream: what is held, ready, running, put off and lost, and what may start next. Pure.

An entry is in the book from the moment it was received until the broker confirmed what became of it. So the book's
oldest entry is the oldest that is not acknowledged, and its size bounds the reading.

Three things keep an entry that is held from being ready. Its *key*: a key's next message starts when the one before has
left, and one that waits for a retry has not left. *Probation*: entries whose last holder never came back start one at
a time, each charged before, because one of them may be what kills consumers. *Doubt*: what others may have taken over
meanwhile is not started before the broker was asked.

An entry that nobody settles is let go after a longest hold: it gets no more signs of life, so that others may take it.
What no handler has seen leaves the book then; what was started stays until its handler ends, and takes up room.

Batches and weights between topics are decided above, by handlers that wait (``calls.py``, ``route.py``): to the
book their messages are running, each for itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from millstream.messaging.message import Message
from millstream.messaging.settings import KeyOf
from millstream.messaging.subscriber.room import Room
from millstream.model import EntryId

TRUST_AFTER = 64
"""So many suspects start one at a time. A process that has outlived them takes two at a time, then four, ..."""
MARGIN = 3
"""A suspect starts beside others only while it has so many starts left: one beside a killer, one alone, one spare."""

_NONE: frozenset[EntryId] = frozenset()
"""One for all books: most are never given anything to put there."""


class Book:
    __slots__ = (
        "_alone",
        "_key_of",
        "_keys",
        "_lanes",
        "_max_bytes",
        "_max_deliveries",
        "_max_entries",
        "_outputs",
        "_passed",
        "_running",
        "_seen",
        "_suspects",
        "_waiting",
        "delayed",
        "doubtful",
        "entries",
        "expired",
        "lost",
        "outputs_weight",
        "probation_limit",
        "ready",
        "room_of_all",
        "weight",
    )

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        *,
        max_deliveries: int = 5,
        key_of: KeyOf | None = None,
        room_of_all: Room | None = None,
    ) -> None:
        self.entries: dict[EntryId, Message] = {}
        """All that is held."""
        self.ready: deque[Message] = deque()
        """What may be started now, in order."""
        self.doubtful: Sequence[Message] = ()
        """What may have been taken over by others meanwhile."""
        self.lost: frozenset[EntryId] = _NONE
        """What others took over while a handler here was at work on it. It stays in the book until that ends: so it is
        never joined by a second one in the same process."""
        self.expired: frozenset[EntryId] = _NONE
        """What was held for too long: let go, while a handler here is still at work on it."""
        self.delayed: dict[EntryId, tuple[Message, bool]] = {}
        """What waits for a retry inside this process, because it holds its key back; whether that start is charged."""
        self.weight = 0
        """Bytes of all payloads in the book."""
        self.outputs_weight = 0
        """Bytes that handlers put out and that are not stored yet."""
        self.probation_limit = max(1, max_entries // 2)
        """How many suspects may be held: they take up room that others could be handled in."""
        self.room_of_all = room_of_all or Room(1 << 62, 1 << 62)
        self._outputs: dict[EntryId, int] = {}
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_deliveries = max_deliveries
        self._key_of = key_of
        self._lanes: dict[str, deque[Message]] = {}
        """Key to its messages in order; the first is the one that may be started."""
        self._keys: dict[EntryId, str] = {}
        self._suspects: dict[EntryId, None] = {}
        """Those that go through probation: until they are charged, nothing was counted for them."""
        self._waiting: list[tuple[int, EntryId, Message]] = []
        """On probation. The fewest starts go first: whoever was merely near passes before a killer tries again."""
        self._seen: dict[EntryId, tuple[Message, float]] = {}
        """Since when each is held, as far as signs of life have found it: most are gone before the first."""
        self._running: dict[EntryId, None] = {}
        self._alone = False
        """One of those under way must not be joined by others."""
        self._passed = 0

    # --- coming in --------------------------------------------------------------------------------------------------

    def enter(self, message: Message, *, suspect: bool = False) -> None:
        """A message that was received. Whatever the function that names its key raises, nothing has changed."""
        may_start = self._enter_lane(message) if self._key_of is not None else True
        self.hold(message)
        if suspect:
            self._suspects[message.id] = None  # type: ignore[index]  # received: it has an id
        if may_start:
            self._start(message)

    def hold(self, message: Message) -> None:
        """In the book, and in no queue: somebody settles it at once."""
        self.entries[message.id] = message  # type: ignore[index]  # received: it has an id
        message.weight = len(message.payload)
        self.grew(1, message.weight)

    def grew(self, messages: int, size: int) -> None:
        """So much was entered."""
        self.weight += size
        room = self.room_of_all
        room.messages += messages
        room.weight += size
        if messages:
            mean = size / messages
            room.entry_bytes += (mean - room.entry_bytes) * 0.1 if room.entry_bytes else mean

    def adopt(self, entry_id: EntryId, times: int, valid_until: float) -> bool:
        """An entry came to us again. True where a handler is at work on it, or will be: one at a time is enough, and
        with the new count its acknowledgement is accepted.

        Not with one that was asked for earlier than what we know: on a cluster an answer waits for those of other
        nodes, and a start may have been counted meanwhile. With the count from before, all we say would be refused.
        """
        message = self.entries.get(entry_id)
        if message is None:
            return False
        if times < message.times_delivered and valid_until < message.valid_until:
            return True
        message.times_delivered = times
        message.valid_until = valid_until
        if self.lost:
            self.lost -= {entry_id}
        return True

    def once_more(self, fresh: Message, weight: int) -> None:
        """One more start of an entry that is held, and ours: charged, or free of charge.

        A sign of life that was refused while its count rose makes it nobody else's. Marked so, it would never be given
        up when it is lost after this, and whoever waits for it on probation would wait for ever.
        """
        assert fresh.id is not None
        self._suspects.pop(fresh.id, None)
        if self.lost:
            self.lost -= {fresh.id}
        if self.expired:
            self.expired -= {fresh.id}
        self._seen.pop(fresh.id, None)
        fresh.weight = weight
        self.entries[fresh.id] = fresh
        self.ready.append(fresh)

    # --- probation --------------------------------------------------------------------------------------------------

    def next_suspects(self) -> tuple[list[Message], list[Message]]:
        """Who starts now, to be charged first, so that a killer cannot dodge it; and who had too many starts."""
        starts: list[Message] = []
        exhausted: list[Message] = []
        while self._waiting:
            times, entry_id, message = self._waiting[0]
            alone = times > self._max_deliveries - MARGIN
            if self._running and (alone or self._alone or len(self._running) >= self._window()):
                break
            heapq.heappop(self._waiting)
            self._running[entry_id] = None
            self._alone = alone
            (exhausted if times >= self._max_deliveries else starts).append(message)
        return starts, exhausted

    def _window(self) -> int:
        if self._passed < TRUST_AFTER:
            return 1
        return min(self.probation_limit, 1 << min(16, self._passed // TRUST_AFTER))

    def probation_room(self) -> int:
        return max(0, self.probation_limit - len(self._waiting) - len(self._running))

    def is_suspect(self, message: Message) -> bool:
        return message.id in self._suspects

    # --- going out --------------------------------------------------------------------------------------------------

    def release(self, ids: Iterable[EntryId]) -> bool:
        """The broker confirmed what became of these: they leave, and others move up. True where suspects may start."""
        ids = list(ids)
        self._drop(ids)
        if self._suspects:
            waited = {entry_id for entry_id in ids if entry_id in self._suspects}
            if waited:  # said to be done before it was started: with an acknowledgement of an earlier start
                self._withdraw(waited)
            for entry_id in waited:
                del self._suspects[entry_id]
        if self.lost:
            self.lost = self.lost.difference(ids)
        if self.expired:
            self.expired = self.expired.difference(ids)
        if self._keys:
            for entry_id in ids:
                following = self._leave_lane(entry_id)
                if following is not None and following.id in self.entries:  # else it leaves in the same go
                    self._start(following)
        if self._running:
            before = len(self._running)
            for entry_id in ids:
                self._running.pop(entry_id, None)
            if len(self._running) < before:
                self._passed += before - len(self._running)
                self._alone = self._alone and bool(self._running)
        return bool(self._waiting)

    def give_up(self, lost: set[EntryId]) -> set[EntryId]:
        """Others have these. What was not started leaves the book; what was started ends, and will be refused.

        Answers those that left."""
        unstarted = lost & {message.id for message in self.unstarted() if message.id is not None}
        self.lost |= lost - unstarted
        self._withdraw(unstarted)
        self.release(sorted(unstarted))  # those behind them move up in this order, too
        return unstarted

    def forget_unstarted(self) -> list[Message]:
        """Takes out of the book, and returns, all that no handler has seen."""
        unstarted = self.unstarted()
        ids = {message.id for message in unstarted if message.id is not None}
        self._withdraw(ids)
        self._drop(ids)
        for entry_id in ids:
            self._leave_lane(entry_id)
            self._suspects.pop(entry_id, None)
            self._running.pop(entry_id, None)  # charged, and not begun: those that wait would wait for it for ever
        self._alone = self._alone and bool(self._running)
        return unstarted

    def unstarted(self) -> list[Message]:
        waiting = [message for _, _, message in sorted(self._waiting)]
        behind = [message for lane in self._lanes.values() for message in list(lane)[1:]]
        return [*self.ready, *self.doubtful, *waiting, *behind]

    def _withdraw(self, ids: set[EntryId]) -> None:
        """Takes entries out of every queue: they must not be started."""
        if any(message.id in ids for message in self.ready):
            kept = [message for message in self.ready if message.id not in ids]
            self.ready.clear()
            self.ready.extend(kept)
        self.doubtful = [message for message in self.doubtful if message.id not in ids]
        if any(entry_id in ids for _, entry_id, _ in self._waiting):
            self._waiting = [one for one in self._waiting if one[1] not in ids]
            heapq.heapify(self._waiting)

    def _drop(self, ids: Iterable[EntryId]) -> None:
        entries, room = self.entries, self.room_of_all
        dropped = size = 0
        for entry_id in ids:
            message = entries.pop(entry_id, None)
            if message is not None:
                dropped += 1
                size += message.weight
                if self._outputs:
                    self.outputs_weight -= self._outputs.pop(entry_id, 0)
        self.weight -= size
        room.messages -= dropped
        room.weight -= size

    # --- certainty --------------------------------------------------------------------------------------------------

    def trust(self, valid_until: float, ids: Iterable[EntryId]) -> None:
        """The broker confirmed that these are ours."""
        for entry_id in ids:
            message = self.entries.get(entry_id)
            if message is not None:
                message.valid_until = valid_until

    def doubt(self, message: Message) -> None:
        """It is not started before the broker was asked."""
        self.doubtful = (*self.doubtful, message)

    def reconsider(self, now: float) -> None:
        """What was doubtful and is certain again may be started, before what came later."""
        certain = [message for message in self.doubtful if message.valid_until >= now]
        self.doubtful = [message for message in self.doubtful if message.valid_until < now]
        self.ready.extendleft(reversed(certain))

    def oldest(self) -> EntryId | None:
        return min(self.entries, default=None)

    def by_count(self) -> dict[int, list[EntryId]]:
        """What needs a sign of life: ids by their delivery count, as the broker's steps take them."""
        if not self.expired:
            return ids_by_count(self.entries.values())
        return ids_by_count(message for message in self.entries.values() if message.id not in self.expired)

    # --- the longest hold -------------------------------------------------------------------------------------------

    def expire(self, now: float, max_hold: float) -> list[tuple[Message, int]]:
        """Asked before each sign of life: those that are held for ``max_hold`` without an outcome, and the delivery
        count with which each is to be given back. A hold begins when a sign of life first finds the message."""
        known, self._seen = self._seen, {}
        late: list[Message] = []
        for entry_id, message in self.entries.items():
            first = known.get(entry_id)
            self._seen[entry_id] = first = first if first is not None and first[0] is message else (message, now)
            if now - first[1] >= max_hold and message.settled is None and entry_id not in self.expired:
                late.append(message)
        if not late:
            return []
        unstarted = {message.id for message in self.unstarted() if message.id is not None}
        # A read counts a delivery: what nobody has started gets its count back. Suspects were not charged yet.
        free = {message.id for message in late if message.id in unstarted and message.id not in self._suspects}
        leaving = [(one, max(0, one.times_delivered - 1) if one.id in free else one.times_delivered) for one in late]
        ids = {message.id for message in late if message.id is not None}
        self.expired |= ids - unstarted
        self._withdraw(ids & unstarted)
        self.release(sorted(ids & unstarted))
        return leaving

    @property
    def stuck(self) -> bool:
        """It has no room, and nothing in it but what was held for too long: nothing will move by itself."""
        return 0 < len(self.entries) == len(self.expired) and (self.room() <= 0 or self.room_of_all.free() <= 0)

    # --- room -------------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """How many entries more may be held. Bytes bound it too, but an empty book always has room for one."""
        if self.weight + self.outputs_weight >= self._max_bytes:
            return 0
        return self._max_entries - len(self.entries)

    def room_bytes(self) -> int:
        return max(0, self._max_bytes - self.weight - self.outputs_weight)

    def put_out(self, entry_id: EntryId, size: int) -> None:
        """What its handler put out waits to be stored: until the entry leaves the book, it takes up room."""
        if entry_id in self.entries:
            self._outputs[entry_id] = size
            self.outputs_weight += size

    @property
    def outputs_full(self) -> bool:
        """Handlers put out faster than it can be stored: no other one starts. Soft: those that run may add to it."""
        return self.outputs_weight >= self._max_bytes

    # --- keys -------------------------------------------------------------------------------------------------------

    @property
    def keeps_order(self) -> bool:
        return self._key_of is not None

    def _start(self, message: Message) -> None:
        if message.id in self._suspects:
            heapq.heappush(self._waiting, (message.times_delivered, message.id, message))
        else:
            self.ready.append(message)

    def _enter_lane(self, message: Message) -> bool:
        """True if it may start now; False if it waits behind another of its key."""
        assert self._key_of is not None
        assert message.id is not None
        key = self._key_of(message)
        if key is None:
            return True
        lane = self._lanes.setdefault(key, deque())
        lane.append(message)
        self._keys[message.id] = key
        return len(lane) == 1

    def _leave_lane(self, entry_id: EntryId) -> Message | None:
        """The message that may start because this one has left, if there is one."""
        key = self._keys.pop(entry_id, None)
        if key is None:
            return None
        lane = self._lanes[key]
        was_first = lane[0].id == entry_id
        for message in lane:
            if message.id == entry_id:
                lane.remove(message)
                break
        if not lane:
            del self._lanes[key]
            return None
        return lane[0] if was_first else None


def messages_by_count(messages: Iterable[Message]) -> dict[int, list[Message]]:
    groups: dict[int, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.times_delivered, []).append(message)
    return groups


def ids_by_count(messages: Iterable[Message]) -> dict[int, list[EntryId]]:
    groups: dict[int, list[EntryId]] = {}
    for message in messages:
        assert message.id is not None
        ids = groups.get(message.times_delivered)
        if ids is None:
            groups[message.times_delivered] = [message.id]
        else:
            ids.append(message.id)
    return groups
