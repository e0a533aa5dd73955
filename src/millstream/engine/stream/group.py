"""A consumer group and its consumers. Group and consumer share what is known of a pending entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream.engine.stream.pending import Holding, PendingList

UNKNOWN_READS: Final = -1
"""``entries_read`` where nobody can say how many entries the group has read."""


class Consumer:
    __slots__ = ("name", "pending", "seen_ms")

    def __init__(self, name: bytes, now_ms: int) -> None:
        self.name = name
        self.seen_ms = now_ms
        """When it last spoke."""
        self.pending = PendingList()


class Group:
    __slots__ = ("consumers", "entries_read", "last_id", "name", "pending")

    def __init__(self, name: bytes, last_id: int, entries_read: int) -> None:
        self.name = name
        self.last_id = last_id
        """The last entry that was delivered to anybody."""
        self.entries_read = entries_read
        self.pending = PendingList()
        self.consumers: dict[bytes, Consumer] = {}

    def consumers_by_name(self) -> list[Consumer]:
        return [self.consumers[name] for name in sorted(self.consumers)]

    def deliver(self, ids: Sequence[int], consumer: Consumer, now_ms: int) -> None:
        """Ids in ascending order are now with ``consumer``, for the first time as it seems to them."""
        holding = (consumer, now_ms, 1)
        if ids[0] > self.pending.last_ever():
            self.pending.add_all(ids, holding)
            consumer.pending.add_all(ids, holding)
            return
        for entry_id in ids:  # the group was set back: some may be pending already, with anybody
            self.hold(entry_id, holding)

    def hold(self, entry_id: int, holding: Holding) -> None:
        """The entry is with the holding's consumer, and with nobody else."""
        before = self.pending.get(entry_id)
        if before is not None and before[0] is not holding[0]:
            before[0].pending.pop(entry_id)
        self.pending.put(entry_id, holding)
        holding[0].pending.put(entry_id, holding)

    def release(self, entry_id: int) -> bool:
        """The entry is pending no longer. False: it was not."""
        holding = self.pending.pop(entry_id)
        if holding is None:
            return False
        holding[0].pending.pop(entry_id)
        return True

    def release_all(self, ids: Sequence[int]) -> int:
        """Returns how many of them were pending."""
        released = self.pending.pop_all(ids)
        for consumer in {holding[0] for holding in released}:
            consumer.pending.pop_all(ids)
        return len(released)

    def remove_consumer(self, consumer: Consumer) -> int:
        """With everything that it held. Returns how much that was."""
        for entry_id, _ in consumer.pending.items():
            self.pending.pop(entry_id)
        del self.consumers[consumer.name]
        return len(consumer.pending)
