"""A stream: entries in nodes, counters, groups. Callers have validated the arguments: ids are new and ascending.

Nodes begin and end exactly where Redis's do, because approximate trimming drops whole nodes, which clients can observe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from millstream.engine.numbers import INT64_MAX
from millstream.engine.stream.group import Group
from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
from millstream.engine.stream.index import NodeIndex, count_nodes
from millstream.engine.stream.listpack import MAX_BYTES
from millstream.engine.stream.node import SMALL_NUMBERS, Fields, OpenNode
from millstream.engine.stream.sealed import SealedNode
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from millstream.engine.stream.node import StreamNode


@dataclass(slots=True)
class Trim:
    """Trimming options of a command: keep at most ``max_len`` entries, or no entries before ``min_id``."""

    max_len: int | None = None
    min_id: int | None = None
    approximate: bool = False
    limit: int = 0
    """The maximum number of entries to remove; 0 means no limit."""

    def apply(self, stream: Stream) -> int:
        """Trims the stream; returns the number of removed entries."""
        deleted = 0
        nodes = stream.nodes
        max_len = self.max_len
        while len(nodes):
            if max_len is not None and stream.length <= max_len:
                break
            at = nodes.first
            node = nodes[at]
            live = node.live
            if self.limit and deleted + live > self.limit:
                break
            if self._is_too_old(node) if max_len is None else stream.length - live >= max_len:
                stream.remove_node(at)
                stream.count_removed(live)
                deleted += live
                continue
            if not self.approximate:
                part = self._count_in_part(stream, node)
                node.kill_first(part)
                stream.count_removed(part)
                deleted += part
            break
        return deleted

    def _is_too_old(self, node: StreamNode) -> bool:
        assert self.min_id is not None
        return node.last_id() < self.min_id

    def _count_in_part(self, stream: Stream, node: StreamNode) -> int:
        """The number of live entries to remove from a node that is trimmed in part."""
        if self.max_len is not None:
            return stream.length - self.max_len
        assert self.min_id is not None
        stop = node.locate(self.min_id)
        return sum(map(node.is_live, range(node.skip, stop)))


TOO_LARGE: Final = "ERR Elements are too large to be stored"
EXHAUSTED: Final = "ERR The stream has exhausted the last possible ID, unable to add more items"

_GROUP_BYTES: Final = 500
_PENDING_BYTES: Final = 260


class NodeLimits(Protocol):
    """The limits of a node's size, from the engine's configuration."""

    stream_node_max_bytes: int
    stream_node_max_entries: int


class Stream:
    """Entries, counters and consumer groups of one key."""

    __slots__ = (
        "_limits",
        "_prefix",
        "_radix",
        "_removed",
        "_sealed_bytes",
        "_tail",
        "groups",
        "last_ms",
        "last_seq",
        "length",
        "max_deleted_id",
        "nodes",
    )

    def __init__(self, limits: NodeLimits) -> None:
        self._limits = limits
        self.length = 0
        self.last_ms = 0
        self.last_seq = 0
        """With ``last_ms`` the id of the last entry ever added, or the id set by XSETID."""
        self.max_deleted_id = 0
        """The greatest id that XDEL ever deleted. Trimming does not change it, because it leaves no gaps."""
        self.groups: dict[bytes, Group] = {}
        self.nodes = NodeIndex()
        self._tail: OpenNode | None = None
        """The last node, if it is open."""
        self._prefix = b"0-"
        """The formatted milliseconds of the last id, with the dash."""
        self._removed = 0
        """The number of entries that were added and removed."""
        self._sealed_bytes = 0
        self._radix = (-1, 0)

    # --- counters ---------------------------------------------------------------------------------------------------

    @property
    def last_id(self) -> int:
        return self.last_ms << SEQ_BITS | self.last_seq

    @last_id.setter
    def last_id(self, entry_id: int) -> None:
        self.last_ms, self.last_seq = entry_id >> SEQ_BITS, entry_id & SEQ_MAX
        self._prefix = b"%d-" % self.last_ms
        self._clamp_deleted_ids(entry_id)
        self._force_slow_append_near_limit()

    @property
    def entries_added(self) -> int:
        """The number of entries ever added, or the number set by XSETID."""
        return min(self.length + self._removed, INT64_MAX)

    @entries_added.setter
    def entries_added(self, count: int) -> None:
        self._removed = count - self.length

    @property
    def first_id(self) -> int:
        """The id of the first existing entry; 0 in an empty stream."""
        for node in self.nodes:
            if node.live:
                return node.id_at(node.skip)
        return 0

    @property
    def top_id(self) -> int:
        """The id of the last existing entry; 0 in an empty stream."""
        for at in range(self.nodes.end - 1, self.nodes.first - 1, -1):
            node = self.nodes[at]
            if node.live:
                return node.id_at(node.before(node.total, 1))
        return 0

    @property
    def radix_tree_nodes(self) -> int:
        """The number of nodes of Redis's radix tree over the first ids of the stream's nodes."""
        if self._radix[0] != self.nodes.version:
            self._radix = self.nodes.version, count_nodes(self.nodes.first_ids())
        return self._radix[1]

    @property
    def memory_bytes(self) -> int:
        """An estimate of the memory, updated with each change."""
        tail = self._tail
        if tail is not None and tail.used >= MAX_BYTES:  # not a size, but set by _force_slow_append_near_limit
            tail.redis_bytes()
        open_bytes = 0 if tail is None else tail.used + 200 * tail.total
        self._force_slow_append_near_limit()
        pending = sum(_GROUP_BYTES + _PENDING_BYTES * len(group.pending) for group in self.groups.values())
        return 600 + self._sealed_bytes + open_bytes + pending

    # --- entries ----------------------------------------------------------------------------------------------------

    def append_now(self, now_ms: int, fields: Fields) -> bytes:
        """Adds an entry with the next id by the clock; ids ascend also if the clock goes back. Returns the id.

        This is the hot path of XADD. It adds the entry itself if the entry has one field, with the name that the first
        entry of the node has, and certainly fits into the node.
        """
        tail = self._tail
        if now_ms <= self.last_ms:
            ms, seq = self.last_ms, self.last_seq + 1
        elif tail is not None and now_ms < tail.until_ms:
            ms, seq = now_ms, 0
            self._prefix = b"%d-" % ms
        else:
            return self._append_slowly(now_ms, 0, fields)
        if tail is None or fields[0] != tail.name or len(fields) != 2:
            return self._append_slowly(ms, seq, fields)
        limits = self._limits
        used = tail.used + len(fields[1])
        rows = tail.rows
        if used >= limits.stream_node_max_bytes or len(rows) >= limits.stream_node_max_entries:
            return self._append_slowly(ms, seq, fields)
        tail.used = used + tail.entry_overhead
        tail.times.append(ms)
        tail.seqs.append(seq)
        rows.append(fields)
        self.length += 1
        self.last_ms = ms
        self.last_seq = seq
        return self._prefix + (SMALL_NUMBERS[seq] if seq < 1000 else b"%d" % seq)

    def _append_slowly(self, ms: int, seq: int, fields: Fields) -> bytes:
        if seq > SEQ_MAX:
            ms, seq = ms + 1, 0
            if ms > SEQ_MAX:
                raise ErrorReply(EXHAUSTED)
        self.append(ms, seq, fields)
        return b"%d-%d" % (ms, seq)

    def append(self, ms: int, seq: int, fields: Fields) -> None:
        """Adds an entry with an id that is greater than ``last_id``."""
        length = sum(map(len, fields))
        if length > MAX_BYTES:
            raise ErrorReply(TOO_LARGE)
        tail = self._tail or self._reopen()
        limits = self._limits
        if tail is None:
            self._start_node(ms, seq, fields)
        elif tail.has_room_for(length, limits.stream_node_max_bytes or MAX_BYTES, limits.stream_node_max_entries):
            tail.add(ms, seq, fields, length)
        else:
            self._seal(tail)
            self._start_node(ms, seq, fields)
        self.length += 1
        self.last_ms = ms
        self.last_seq = seq
        self._prefix = b"%d-" % ms
        self._force_slow_append_near_limit()

    def append_node(self, entries: list[tuple[int, int, Fields]], deleted: Sequence[int]) -> None:
        """Adds a complete node (RESTORE); ``deleted`` contains the indexes of its deleted entries, and not all of them.

        The ids do not descend. The node keeps its boundaries, whatever the node limits are.
        """
        if self._tail is not None:
            self._seal(self._tail)
        for ms, seq, fields in entries:
            if self._tail is None:
                self._start_node(ms, seq, fields)
            else:
                self._tail.add(ms, seq, fields, sum(map(len, fields)))
            self.length += 1
            self.last_ms, self.last_seq = ms, seq
        assert self._tail is not None
        for index in deleted:
            self._tail.kill(index)
        self.count_removed(len(deleted))
        self._prefix = b"%d-" % self.last_ms
        self._force_slow_append_near_limit()

    def _force_slow_append_near_limit(self) -> None:
        """Disables the fast path of ``append_now``, which does not check whether sequence numbers are exhausted."""
        if self.last_seq >> 62 and self._tail is not None:
            self._tail.used = MAX_BYTES

    def _start_node(self, ms: int, seq: int, fields: Fields) -> None:
        self._tail = OpenNode(ms, seq, fields)
        self.nodes.append(ms << SEQ_BITS | seq, self._tail)  # in order, even after XSETID set a smaller last id

    def _seal(self, tail: OpenNode) -> None:
        at = self.nodes.end - 1
        names = tail.names
        if at > self.nodes.first and self.nodes[at - 1].names == names:
            names = self.nodes[at - 1].names  # share one tuple between nodes with the same names
        sealed = SealedNode(tail, names)
        self.nodes[at] = sealed
        self._sealed_bytes += sealed.memory_bytes()
        self._tail = None

    def _reopen(self) -> OpenNode | None:
        """After the last node was removed, reopens the node before it, as Redis adds entries to it again."""
        if not len(self.nodes):
            return None
        at = self.nodes.end - 1
        sealed = self.nodes[at]
        assert isinstance(sealed, SealedNode)
        self._sealed_bytes -= sealed.memory_bytes()
        self.nodes[at] = self._tail = OpenNode.reopened(sealed, self.nodes.first_id(at))
        return self._tail

    def has(self, entry_id: int) -> bool:
        if not self.length:
            return False
        return self.nodes[self.nodes.position(entry_id)].find(entry_id) is not None

    def delete(self, entry_id: int) -> bool:
        """Deletes one entry; False if it does not exist."""
        if not self.length:
            return False
        at = self.nodes.position(entry_id)
        node = self.nodes[at]
        index = node.find(entry_id)
        if index is None:
            return False
        if node.live == 1:
            self.remove_node(at)
        else:
            node.kill(index)
        self.count_removed(1)
        self.max_deleted_id = max(self.max_deleted_id, entry_id)
        return True

    def remove_node(self, at: int) -> None:
        node = self.nodes[at]
        if node is self._tail:
            self._tail = None
        elif isinstance(node, SealedNode):
            self._sealed_bytes -= node.memory_bytes()
        self.nodes.remove(at)

    def count_removed(self, count: int) -> None:
        self.length -= count
        self._removed += count

    def _clamp_deleted_ids(self, last_id: int) -> None:
        """Replaces the ids of deleted entries after ``last_id``, which XSETID may have set back, so that new entries
        stay in order."""
        tail = self._tail or self._reopen()
        if tail is not None and tail.last_id() > last_id:
            tail.clamp(last_id)

    # --- groups -----------------------------------------------------------------------------------------------------

    def groups_by_name(self) -> list[Group]:
        return [self.groups[name] for name in sorted(self.groups)]
