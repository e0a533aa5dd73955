"""The nodes of a stream, searchable by id. Removing the first node takes constant time on average."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from millstream.engine.stream.node import StreamNode

_MIN_FREE_BEFORE_CUT: Final = 64


class NodeIndex:
    """Nodes in order of their first ids. ``at`` is a position, which is valid until the next change."""

    __slots__ = ("_firsts", "_head", "_nodes", "version")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._nodes: list[StreamNode | None] = []
        self._head = 0
        """Positions before it are free. They are removed in batches, because each removal moves all other nodes."""
        self.version = 0
        """Changes with the set of first ids."""

    def __len__(self) -> int:
        return len(self._nodes) - self._head

    def __iter__(self) -> Iterator[StreamNode]:
        return (node for node in self._nodes[self._head :] if node is not None)

    @property
    def first(self) -> int:
        """The first position."""
        return self._head

    @property
    def end(self) -> int:
        """The position after the last node."""
        return len(self._nodes)

    def __getitem__(self, at: int) -> StreamNode:
        node = self._nodes[at]
        assert node is not None
        return node

    def __setitem__(self, at: int, node: StreamNode) -> None:
        """Replaces a node by another representation of the same node (open or sealed)."""
        self._nodes[at] = node

    def position(self, entry_id: int) -> int:
        """The position of the node that would contain this id; the first position for an id before all nodes."""
        return max(bisect_right(self._firsts, entry_id, self._head) - 1, self._head)

    def append(self, first_id: int, node: StreamNode) -> None:
        """Adds a node whose entries follow all others.

        After XSETID set a last id before deleted entries, the first id of the last node can be greater than the new
        one. Then the last node is indexed by the id to which its entries were moved.
        """
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
        if self._head > _MIN_FREE_BEFORE_CUT and self._head * 2 > len(self._nodes):
            del self._firsts[: self._head], self._nodes[: self._head]
            self._head = 0

    def first_id(self, at: int) -> int:
        return self._firsts[at]

    def first_ids(self) -> list[int]:
        return self._firsts[self._head :]


KEY_BYTES: Final = 16


def count_nodes(keys: Sequence[int]) -> int:
    """The number of nodes of Redis's radix tree for these keys: 16-byte numbers in ascending order.

    The tree has a leaf for each key, a node for each branch, and a node for each run of bytes between branches. A run
    of any length is one node, because Redis compresses it. A branch node includes the byte after it.
    """
    if not keys:
        return 1
    leaves, branches, runs = len(keys), 0, 0
    open_branches: list[int] = []  # depths on the way to the last key, ascending
    previous = keys[0]
    for key in keys[1:]:
        depth = KEY_BYTES - ((previous ^ key).bit_length() + 7) // 8
        below = KEY_BYTES
        while open_branches and open_branches[-1] > depth:
            branch = open_branches.pop()
            runs += below - branch > 1
            below = branch
        runs += below - depth > 1
        if not open_branches or open_branches[-1] < depth:
            open_branches.append(depth)
            branches += 1
        previous = key
    below = KEY_BYTES
    while open_branches:
        branch = open_branches.pop()
        runs += below - branch > 1
        below = branch
    return leaves + branches + runs + (below > 0)
