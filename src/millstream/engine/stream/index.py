"""The nodes of a stream, found by id. Dropping from the front costs the same however many there are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from millstream.engine.stream.node import StreamNode

_FEW: Final = 64


class NodeIndex:
    """Nodes in order of their first ids. ``at`` is a place: it is good until the next change."""

    __slots__ = ("_firsts", "_head", "_nodes", "version")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._nodes: list[StreamNode | None] = []
        self._head = 0
        """Places before it are free: cutting them off each time would move all the others."""
        self.version = 0
        """Changes with the set of first ids."""

    def __len__(self) -> int:
        return len(self._nodes) - self._head

    def __iter__(self) -> Iterator[StreamNode]:
        return (node for node in self._nodes[self._head :] if node is not None)

    @property
    def first(self) -> int:
        """The first place."""
        return self._head

    @property
    def end(self) -> int:
        """The place behind the last."""
        return len(self._nodes)

    def __getitem__(self, at: int) -> StreamNode:
        node = self._nodes[at]
        assert node is not None
        return node

    def __setitem__(self, at: int, node: StreamNode) -> None:
        """Another form of the same node."""
        self._nodes[at] = node

    def place(self, entry_id: int) -> int:
        """The place of the node that would hold this id; the first one for an id before all of them."""
        return max(bisect_right(self._firsts, entry_id, self._head) - 1, self._head)

    def append(self, first_id: int, node: StreamNode) -> None:
        """A node whose entries come after all others. The last one may be known by a greater id, after XSETID has gone
        back behind its deleted entries: then it is found by where its entries were moved to."""
        if len(self) and self._firsts[-1] >= first_id:
            self._firsts[-1] = self[self.end - 1].id_at(0)
        self._firsts.append(first_id)
        self._nodes.append(node)
        self.version += 1

    def remove(self, at: int) -> None:
        self.version += 1
        if at > self._head:
            del self._firsts[at], self._nodes[at]
            return
        self._nodes[at] = None
        self._head += 1
        if self._head > _FEW and self._head * 2 > len(self._nodes):
            del self._firsts[: self._head], self._nodes[: self._head]
            self._head = 0

    def first_id(self, at: int) -> int:
        return self._firsts[at]

    def first_ids(self) -> list[int]:
        return self._firsts[self._head :]


KEY_BYTES: Final = 16


def count_nodes(keys: Sequence[int]) -> int:
    """How many nodes Redis's radix tree has for these keys: 16-byte numbers in ascending order.

    The tree has a leaf for each key, a node wherever keys part, and one for each stretch of bytes between them: a
    stretch of any length is one node, because Redis compresses it, and a parting takes the byte after it with it.
    """
    if not keys:
        return 1
    leaves, partings, stretches = len(keys), 0, 0
    open_partings: list[int] = []  # depths on the way to the last key, ascending
    previous = keys[0]
    for key in keys[1:]:
        depth = KEY_BYTES - ((previous ^ key).bit_length() + 7) // 8
        below = KEY_BYTES
        while open_partings and open_partings[-1] > depth:
            parting = open_partings.pop()
            stretches += below - parting > 1
            below = parting
        stretches += below - depth > 1
        if not open_partings or open_partings[-1] < depth:
            open_partings.append(depth)
            partings += 1
        previous = key
    below = KEY_BYTES
    while open_partings:
        parting = open_partings.pop()
        stretches += below - parting > 1
        below = parting
    return leaves + partings + stretches + (below > 0)
