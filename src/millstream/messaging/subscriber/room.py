"""Room for messages: what a process may hold, and who may ask for how much of it. Pure.

COUNT is for each stream of a read. So streams times COUNT stay within the room of the process, and COUNT within the
least room of a topic that the read names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.messaging.subscriber.topic import Topic

MOST = 4_000
"""Messages that one read of many topics may bring: those of which there are more become hot."""
CERTAIN_S = 0.25
"""How often leases are looked at: each read would ask for hundreds, which change together and rarely."""
UNCERTAIN_MS = 50.0
"""How long the others are waited for where a lease is not certain: it may be in a moment."""


class Room:
    """What all books of one process may hold together. Reads that are under way have reserved their part."""

    __slots__ = ("entry_bytes", "max_bytes", "max_messages", "messages", "reserved", "weight")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.messages = 0
        self.weight = 0
        self.reserved = 0
        self.entry_bytes = 0.0
        """A running mean of what messages weigh: it turns the bound in bytes into one in messages before reading."""

    def free(self) -> int:
        """How many messages more may be read, as far as past ones tell. An empty one has room for one of any size."""
        if self.weight >= self.max_bytes:
            return 0
        free = self.max_messages - self.messages
        if self.entry_bytes > 0:
            free = min(free, max(int(self.free_bytes() / self.entry_bytes), self.messages == 0))
        return max(0, free - self.reserved)

    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.weight)

    def shares(self, wanted: Mapping[Topic, int], *, alone: bool) -> dict[Topic, int]:
        """How many entries each may be brought: what it has room for, within its part of what the process may hold.
        Where that is not enough for all, those that got nothing the last time come first."""
        wanting = sorted((topic for topic in wanted if wanted[topic] > 0), key=lambda topic: not topic.starved)
        if alone:
            return {topic: wanted[topic] for topic in wanting}  # the process has as much room as its one topic
        free = self.free()
        if not (self.messages or self.entry_bytes):
            free = min(free, len(wanting))  # nobody knows yet what messages weigh here
        shares: dict[Topic, int] = {}
        for number, topic in enumerate(wanting):
            share = min(wanted[topic], -(-free // (len(wanting) - number)))
            topic.starved = share <= 0
            if share > 0:
                shares[topic] = share
                free -= share
        return shares


class Choice:
    """What the next read of a shard names, how long it may wait, and how many it may ask of each.

    Worked out anew when something has changed: that takes longer than reading.
    """

    def __init__(self, topics: Mapping[bytes, Topic], room: Room) -> None:
        self.block_ms = 0
        self._topics = topics
        self._room = room
        self._chosen: dict[bytes, Topic] | None = None
        self._most = self._least = 1
        self._active: set[Topic] = set()
        """Topics that may hold something: the others have all their room."""
        self._certain_of: dict[bytes, Topic] | None = None
        self._certain_until = self._certain_at = 0.0
        """Until when all topics of that choice are ours, and when that was seen."""

    def holds(self, topic: Topic) -> None:
        """Something came for the topic, whoever brought it: the next read asks for as much less."""
        self._active.add(topic)

    def drop(self, topic: Topic) -> None:
        self._active.discard(topic)

    def forget(self) -> None:
        """What was chosen holds no longer."""
        self._chosen = None

    def topics(self) -> dict[bytes, Topic]:
        """Those that have room and are not hot."""
        for topic in list(self._active):
            room = topic.book.room()
            if room <= 0:
                topic.left_out = True
                self.forget()
            elif not topic.book.entries:
                self._active.discard(topic)
        if self._chosen is None:
            self._chosen = {}
            self.block_ms = self._most = 1 << 30
            for key, topic in self._topics.items():
                topic.left_out = topic.book.room() <= 0 or topic.catching_up
                if not (topic.hot or topic.closing or topic.fetching or topic.left_out):
                    self._chosen[key] = topic
                    self.block_ms = min(self.block_ms, topic.block_ms)
                    self._most = min(self._most, topic.settings.count, topic.settings.max_in_flight)
        self._least = min(
            (topic.book.room() for topic in self._active if topic.key in self._chosen), default=self._most
        )
        return self._chosen

    def while_certain(self, choice: dict[bytes, Topic], now: float) -> tuple[dict[bytes, Topic], float]:
        """Those that nobody else can have taken, and for how many milliseconds: a read is not fenced, so it neither
        begins nor waits past a lease. It would take what the next owner's handlers are to have before what follows."""
        if choice is not self._certain_of or now > self._certain_until or now > self._certain_at + CERTAIN_S:
            leases = [topic.certain_until() for topic in choice.values() if topic.certain_until is not None]
            self._certain_until = min(leases, default=math.inf)
            self._certain_of, self._certain_at = choice, now
        if now < self._certain_until:
            return choice, (self._certain_until - now) * 1000
        return {key: topic for key, topic in choice.items() if topic.lease_is_certain(now)}, UNCERTAIN_MS

    def count(self, named: int, free: int, everybody: int, reads_beside: int) -> int:
        """How many to ask of each of the ``named``: half of the room at most for reads that wait, the other half is for
        topics that are known to be busy. ``reads_beside``: those that together bring what one of many topics may."""
        if not self._room.entry_bytes:
            return 1  # nobody knows yet what messages weigh here: so many large ones would be far too much
        room_of_each = free // 2 // max(named, everybody)
        return max(1, min(self._most, self._least, room_of_each, MOST // named // reads_beside))
