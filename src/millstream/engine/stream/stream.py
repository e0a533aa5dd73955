"""A stream: entries in nodes, counters, groups. What it is told to do is already decided: ids are new and in order.

Nodes begin and end exactly where Redis's do, because approximate trimming drops whole nodes and clients see the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from millstream.engine.stream.group import Group
from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
from millstream.engine.stream.index import NodeIndex, count_nodes
from millstream.engine.stream.listpack import MAX_BYTES
from millstream.engine.stream.node import SMALL_NUMBERS, OpenNode, Words
from millstream.engine.stream.sealed import SealedNode
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from millstream.engine.stream.node import StreamNode


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

    def _is_too_old(self, node: StreamNode) -> bool:
        assert self.min_id is not None
        return node.last_id() < self.min_id

    def _part_of(self, stream: Stream, node: StreamNode) -> int:
        """How many live entries of this node go, where not all of its places do."""
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
    """Where a node ends; the engine's configuration."""

    stream_node_max_bytes: int
    stream_node_max_entries: int


class Stream:
    __slots__ = (
        "_gone",
        "_limits",
        "_prefix",
        "_radix",
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
        """Together the id of the last entry that was ever added, or what XSETID said."""
        self.max_deleted_id = 0
        """The greatest id that was ever deleted singly (XDEL); trimming leaves no holes, so it does not count."""
        self.groups: dict[bytes, Group] = {}
        self.nodes = NodeIndex()
        self._tail: OpenNode | None = None
        """The last node, if it is open."""
        self._prefix = b"0-"
        """What the last entry's id begins with."""
        self._gone = 0
        """How many entries were added and are no longer there."""
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
        self._forget_later_places(entry_id)
        self._heed_last_number()

    @property
    def entries_added(self) -> int:
        """How many entries were ever added, or what XSETID said."""
        return self.length + self._gone

    @entries_added.setter
    def entries_added(self, count: int) -> None:
        self._gone = count - self.length

    @property
    def first_id(self) -> int:
        """Of the first entry that is there; 0 in an empty stream."""
        for node in self.nodes:
            if node.live:
                return node.id_at(node.skip)
        return 0

    @property
    def top_id(self) -> int:
        """Of the last entry that is there; 0 in an empty stream."""
        for at in range(self.nodes.end - 1, self.nodes.first - 1, -1):
            node = self.nodes[at]
            if node.live:
                return node.id_at(node.before(node.total, 1))
        return 0

    @property
    def radix_tree_nodes(self) -> int:
        """What Redis's radix tree over the first ids of the nodes would have."""
        if self._radix[0] != self.nodes.version:
            self._radix = self.nodes.version, count_nodes(self.nodes.first_ids())
        return self._radix[1]

    @property
    def memory_bytes(self) -> int:
        """An estimate, kept up to date as entries come and go."""
        tail = self._tail
        if tail is not None and tail.used >= MAX_BYTES:  # no size, but the mark that `_heed_last_number` has put there
            tail.redis_bytes()
        open_bytes = 0 if tail is None else tail.used + 200 * tail.total
        self._heed_last_number()
        pending = sum(_GROUP_BYTES + _PENDING_BYTES * len(group.pending) for group in self.groups.values())
        return 600 + self._sealed_bytes + open_bytes + pending

    # --- entries ----------------------------------------------------------------------------------------------------

    def append_now(self, now_ms: int, words: Words) -> bytes:
        """Adds an entry with the next id by the clock, which may stand still or go back: ids go on. Returns the id.

        This is where XADD spends its time. An entry with the one field that the node's first entry has, in a node that
        is sure to have room for it, is added right here.
        """
        tail = self._tail
        if now_ms <= self.last_ms:
            ms, seq = self.last_ms, self.last_seq + 1
        elif tail is not None and now_ms < tail.until_ms:
            ms, seq = now_ms, 0
            self._prefix = b"%d-" % ms
        else:
            return self._append_slowly(now_ms, 0, words)
        if tail is None or words[0] != tail.name or len(words) != 2:
            return self._append_slowly(ms, seq, words)
        limits = self._limits
        used = tail.used + len(words[1])
        rows = tail.rows
        if used >= limits.stream_node_max_bytes or len(rows) >= limits.stream_node_max_entries:
            return self._append_slowly(ms, seq, words)
        tail.used = used + tail.spare
        tail.times.append(ms)
        tail.seqs.append(seq)
        rows.append(words)
        self.length += 1
        self.last_ms = ms
        self.last_seq = seq
        return self._prefix + (SMALL_NUMBERS[seq] if seq < 1000 else b"%d" % seq)

    def _append_slowly(self, ms: int, seq: int, words: Words) -> bytes:
        if seq > SEQ_MAX:
            ms, seq = ms + 1, 0
            if ms > SEQ_MAX:
                raise ErrorReply(EXHAUSTED)
        self.append(ms, seq, words)
        return b"%d-%d" % (ms, seq)

    def append(self, ms: int, seq: int, words: Words) -> None:
        """Adds an entry with an id that is greater than ``last_id``."""
        length = sum(map(len, words))
        if length > MAX_BYTES:
            raise ErrorReply(TOO_LARGE)
        tail = self._tail or self._reopen()
        limits = self._limits
        if tail is None:
            self._start_node(ms, seq, words)
        elif tail.has_room_for(length, limits.stream_node_max_bytes or MAX_BYTES, limits.stream_node_max_entries):
            tail.add(ms, seq, words, length)
        else:
            self._seal(tail)
            self._start_node(ms, seq, words)
        self.length += 1
        self.last_ms = ms
        self.last_seq = seq
        self._prefix = b"%d-" % ms
        self._heed_last_number()

    def append_node(self, entries: list[tuple[int, int, Words]]) -> None:
        """A whole node, which ends where it ended elsewhere, whatever our own limits are (RESTORE). Ids ascend."""
        if self._tail is not None:
            self._seal(self._tail)
        for ms, seq, words in entries:
            if self._tail is None:
                self._start_node(ms, seq, words)
            else:
                self._tail.add(ms, seq, words, sum(map(len, words)))
            self.length += 1
            self.last_ms, self.last_seq = ms, seq
        self._prefix = b"%d-" % self.last_ms
        self._heed_last_number()

    def _heed_last_number(self) -> None:
        """Where sequence numbers may run out, every entry goes the slow way, which looks."""
        if self.last_seq >> 62 and self._tail is not None:
            self._tail.used = MAX_BYTES

    def _start_node(self, ms: int, seq: int, words: Words) -> None:
        self._tail = OpenNode(ms, seq, words)
        self.nodes.append(ms << SEQ_BITS | seq, self._tail)  # in order, even where XSETID has gone back

    def _seal(self, tail: OpenNode) -> None:
        at = self.nodes.end - 1
        names = tail.names
        if at > self.nodes.first and self.nodes[at - 1].names == names:
            names = self.nodes[at - 1].names  # one tuple for all nodes that have the same
        sealed = SealedNode(tail, names)
        self.nodes[at] = sealed
        self._sealed_bytes += sealed.memory_bytes()
        self._tail = None

    def _reopen(self) -> OpenNode | None:
        """After the last node has gone, the one before it takes entries again, as far as it has room."""
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
        return self.nodes[self.nodes.place(entry_id)].find(entry_id) is not None

    def delete(self, entry_id: int) -> bool:
        """One entry; False if it is not there."""
        if not self.length:
            return False
        at = self.nodes.place(entry_id)
        node = self.nodes[at]
        index = node.find(entry_id)
        if index is None:
            return False
        if node.live == 1:
            self.remove_node(at)
        else:
            node.kill(index)
        self.count_gone(1)
        self.max_deleted_id = max(self.max_deleted_id, entry_id)
        return True

    def remove_node(self, at: int) -> None:
        node = self.nodes[at]
        if node is self._tail:
            self._tail = None
        elif isinstance(node, SealedNode):
            self._sealed_bytes -= node.memory_bytes()
        self.nodes.remove(at)

    def count_gone(self, count: int) -> None:
        self.length -= count
        self._gone += count

    def _forget_later_places(self, last_id: int) -> None:
        """XSETID may go back behind entries that were deleted. New ones must not meet their places."""
        tail = self._tail or self._reopen()
        if tail is not None and tail.last_id() > last_id:
            tail.clamp(last_id)

    # --- groups -----------------------------------------------------------------------------------------------------

    def groups_by_name(self) -> list[Group]:
        return [self.groups[name] for name in sorted(self.groups)]
