"""Which node a key belongs to: one server, whatever the sentinels call the primary, or the owner of a cluster's slot.

Written as exchanges, without I/O, so that the async and the blocking link find their way by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from millstream.broker.keys import SLOTS, slot_of
from millstream.broker.links.targets import Node, NodeName, Target
from millstream.errors import InvalidArgument
from millstream.wire import Args, ErrorReply, Reading, as_they_are

R = TypeVar("R")


class Exchange(NamedTuple):
    """Send these, in order, and bring one reply for each; error replies are values."""

    node: Node
    requests: Sequence[Args]
    wait_ms: int | None = 0
    """How long the server may hold the answer back, beyond the usual; None: for ever."""
    alone: bool = False
    """On a connection that nobody else uses meanwhile."""
    whole: bool = False
    """Nothing of anybody else's may come in between on the connection (MULTI)."""
    reading: Reading = as_they_are
    """Applied to replies chunk after chunk, where the requests travel in chunks; else to all of them at once."""
    on_wait: Callable[[int], None] | None = None
    """Told the number of the connection before it waits there, alone."""


class Pause(NamedTuple):
    seconds: float


Exchanges = Generator[Exchange | Pause, Any, R]


class NotSent(Exception):
    """Nothing of the exchange has left: it may be tried again without a thought."""


class NoAnswer(Exception):
    """Some of it was sent, and the connection broke before all answers came. ``replies`` are those that did."""

    def __init__(self, reason: str, replies: Sequence[Any] = ()) -> None:
        super().__init__(reason)
        self.replies = replies


NO_CLUSTER = ("ERR This instance has cluster support disabled", "ERR unknown command 'CLUSTER'")
"""What no waiting mends."""


class NodeRoute(Protocol):
    by_key: bool
    """Whether a key decides where it goes; else one node has everything."""

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        """Raises NotSent when no node can be found now."""

    def known_node(self, key: bytes) -> Node | None:
        """Without asking anybody; None where nobody has been asked yet."""

    def forget(self) -> None:
        """What was known is wrong: find out again."""

    def doubt(self) -> None:
        """A node refused as one does that was replaced, or cut off from the rest: find out again, from others first.
        Whoever named it may be cut off together with it."""

    def moved(self, slot: int, node: Node) -> None:
        """A node said that this slot lives elsewhere."""

    def primaries(self) -> Exchanges[list[Node]]:
        """Every node that holds data of its own."""


def route_to(target: Target) -> NodeRoute:
    if target.kind == "cluster":
        return ClusterRoute(target)
    return SentinelRoute(target) if target.kind == "sentinel" else SingleRoute(target)


class SingleRoute:
    by_key = False

    def __init__(self, target: Target) -> None:
        self._node = target.nodes[0]

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        return self._node
        yield

    def known_node(self, key: bytes) -> Node | None:
        return self._node

    def forget(self) -> None:
        """There is only this one; a new connection may still reach another server behind its name."""

    def doubt(self) -> None:
        """There is only this one."""

    def moved(self, slot: int, node: Node) -> None:
        """A cluster's node that was given as a single server: follow it for this command alone."""

    def primaries(self) -> Exchanges[list[Node]]:
        return [self._node]
        yield


class SentinelRoute:
    """Asks the sentinels in turn; the one that answered is asked first the next time, unless its answer was wrong."""

    by_key = False

    def __init__(self, target: Target) -> None:
        self._sentinels = list(target.nodes)
        self._service = target.service.encode()
        self._primary: Node | None = None

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        if self._primary is None:
            self._primary = yield from self._find()
        return self._primary

    def known_node(self, key: bytes) -> Node | None:
        return self._primary

    def _find(self) -> Exchanges[Node]:
        troubles: list[str] = []
        for sentinel in self._sentinels:
            try:
                (reply,) = yield Exchange(sentinel, [(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service)])
                if isinstance(reply, ErrorReply) or not reply:
                    troubles.append(f"{sentinel} knows no primary called {self._service.decode()!r}")
                    continue
                primary = Node(reply[0].decode(), int(reply[1]))
                # During a failover sentinels name the old primary for a while: it must say itself what it is.
                (role,) = yield Exchange(primary, [(b"ROLE",)])
            except (NotSent, NoAnswer) as trouble:
                troubles.append(f"{sentinel}: {trouble}")
                continue
            if isinstance(role, ErrorReply) or role[0] == b"master":
                # A new list, never a changed one: threads share the route.
                self._sentinels = [sentinel, *(one for one in self._sentinels if one != sentinel)]
                return primary
            troubles.append(f"{sentinel} names {primary}, which says that it is a {role[0].decode()}")
        raise NotSent("; ".join(troubles))

    def forget(self) -> None:
        self._primary = None

    def doubt(self) -> None:
        if self._primary is not None:  # else somebody has doubted it since, and its sentinel is the last one already
            self._primary = None
            first, *others = self._sentinels
            self._sentinels = [*others, first]

    def moved(self, slot: int, node: Node) -> None:
        self._primary = None

    def primaries(self) -> Exchanges[list[Node]]:
        return [(yield from self.node_for(None))]


class ClusterRoute:
    """Keeps the table of slots; a MOVED corrects one line of it, and a node that is gone has it read again."""

    by_key = True

    def __init__(self, target: Target) -> None:
        self._seeds = list(target.nodes)
        self._owners: list[Node | None] = []
        self._teller: Node | None = None
        """Who told the table."""

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        if type(key) is NodeName:
            return key.node()
        if not self._owners:
            self._owners = yield from self._read_table()
        owner = self._owners[slot_of(key)] if key is not None else next(filter(None, self._owners), None)
        if owner is None:
            self._owners = []
            raise NotSent("no node of the cluster serves the slot of this key")
        return owner

    def known_node(self, key: bytes) -> Node | None:
        owners = self._owners  # threads share the route
        return owners[slot_of(key)] if owners else None

    def _read_table(self) -> Exchanges[list[Node | None]]:
        troubles: list[str] = []
        for seed in list(dict.fromkeys(self._seeds)):
            try:
                (reply,) = yield Exchange(seed, [(b"CLUSTER", b"SLOTS")])
            except (NotSent, NoAnswer) as trouble:
                troubles.append(f"{seed}: {trouble}")
                continue
            if isinstance(reply, ErrorReply):
                if reply.text.startswith(NO_CLUSTER):
                    raise InvalidArgument("url", f"redis+cluster:// for {seed}", "redis://: that server is no cluster")
                troubles.append(f"{seed}: {reply.text}")
                continue
            owners: list[Node | None] = [None] * SLOTS
            for first, last, primary, *_ in reply:
                # An empty host means: the one you asked.
                node = Node(primary[0].decode() if primary[0] else seed.host, primary[1])
                owners[first : last + 1] = [node] * (last - first + 1)
            self._remember(filter(None, owners))
            self._teller = seed
            return owners
        raise NotSent("; ".join(troubles))

    def _remember(self, nodes: Iterable[Node]) -> None:
        """Nodes seen in the table are asked the next time too, for the given ones may all be gone by then."""
        self._seeds = list(dict.fromkeys([*self._seeds, *nodes]))[-64:]

    def forget(self) -> None:
        self._owners = []

    def doubt(self) -> None:
        self._owners = []
        self._seeds = sorted(self._seeds, key=lambda seed: seed == self._teller)  # it comes last; the rest as before

    def moved(self, slot: int, node: Node) -> None:
        if self._owners:
            self._owners[slot] = node

    def primaries(self) -> Exchanges[list[Node]]:
        yield from self.node_for(None)
        return list(dict.fromkeys(filter(None, self._owners)))
