"""Trimming: from the front, whole nodes first; what is left of the last one only where exactness is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.stream.node import StreamNode
    from millstream.engine.stream.stream import Stream


@dataclass(slots=True)
class Trim:
    """What a command asked for: at most ``max_len`` entries, or none before ``min_id``."""

    max_len: int | None = None
    min_id: int | None = None
    approximate: bool = False
    limit: int = 0
    """At most so many entries go; 0 is no limit."""

    def apply(self, stream: Stream) -> int:
        """Returns how many entries went."""
        deleted = 0
        nodes = stream.nodes
        while len(nodes):
            if self.max_len is not None and stream.length <= self.max_len:
                break
            at = nodes.first
            node = nodes[at]
            live = node.live
            if self.limit and deleted + live > self.limit:
                break
            if self._takes_all(stream, node):
                stream.remove_node(at)
                stream.count_gone(live)
                deleted += live
                continue
            if not self.approximate:
                part = self._part_of(stream, node)
                node.kill_first(part)
                stream.count_gone(part)
                deleted += part
            break
        return deleted

    def _takes_all(self, stream: Stream, node: StreamNode) -> bool:
        if self.max_len is not None:
            return stream.length - node.live >= self.max_len
        assert self.min_id is not None
        return node.last_id() < self.min_id

    def _part_of(self, stream: Stream, node: StreamNode) -> int:
        """How many live entries of this node go, where not all of its places do."""
        if self.max_len is not None:
            return stream.length - self.max_len
        assert self.min_id is not None
        stop = node.locate(self.min_id)
        return sum(map(node.is_live, range(node.skip, stop)))
