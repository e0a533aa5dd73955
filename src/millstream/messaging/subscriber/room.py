"""Room in the process: what all its topics may hold together under one group and consumer name. Pure."""

from __future__ import annotations


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
