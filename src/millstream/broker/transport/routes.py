"""Routes decide which node a key belongs to: one server, the primary that sentinels report, or the owner of a cluster
slot.

They are generators of exchanges without I/O, which async and blocking transports share.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from millstream.broker.keys import SLOTS, slot_of
from millstream.broker.transport.targets import Node, NodeName, Target
from millstream.errors import InvalidArgument
from millstream.wire import Args, ErrorReply, Reading, return_unchanged

R = TypeVar("R")


class Exchange(NamedTuple):
    """Requests to one node, in order, with one reply for each; error replies are values."""

    node: Node
    requests: Sequence[Args]
    wait_ms: int | None = 0
    """How long the server may delay the reply, in addition to the usual time; None: no limit."""
    alone: bool = False
    """Use a connection that no other task uses meanwhile."""
    whole: bool = False
    """Send no other request between these on the connection (MULTI)."""
    reading: Reading = return_unchanged
    """Converts the replies: of each chunk if the requests are sent in chunks, else all at once."""
    on_wait: Callable[[int], None] | None = None
    """Called with the number of the connection before the exchange waits."""


class Pause(NamedTuple):
    """Wait for this time before the next exchange."""

    seconds: float


Exchanges = Generator[Exchange | Pause, Any, R]
"""A generator of exchanges and pauses that receives the replies."""


class NotSent(Exception):
    """Nothing of the exchange was sent, so it can be repeated safely."""


class NoAnswer(Exception):
    """Some requests were sent, but the connection broke before all replies arrived. ``replies`` are those that
    arrived.
    """

    def __init__(self, reason: str, replies: Sequence[Any] = ()) -> None:
        super().__init__(reason)
        self.replies = replies


NO_CLUSTER = ("ERR This instance has cluster support disabled", "ERR unknown command 'CLUSTER'")
"""Errors of a server that is not in cluster mode: permanent."""


class NodeRoute(Protocol):
    """Finds the node for a key."""

    by_key: bool
    """Whether the key decides the node; otherwise one node has all keys."""

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        """The node for the key. Raises NotSent if no node is known now."""

    def known_node(self, key: bytes) -> Node | None:
        """The node for the key without a request; None if it is unknown yet."""

    def forget(self) -> None:
        """Drops what is known, because it was wrong: the next call asks again."""

    def suspect_failover(self) -> None:
        """Drops what is known after an error of a replaced or partitioned node. The next call asks other servers first.

        The server that named this node may be partitioned together with it.
        """

    def moved(self, slot: int, node: Node) -> None:
        """Records that a node reported another owner of the slot."""

    def primaries(self) -> Exchanges[list[Node]]:
        """Every node that owns data."""


def route_to(target: Target) -> NodeRoute:
    """The route for a target."""
    if target.kind == "cluster":
        return ClusterRoute(target)
    return SentinelRoute(target) if target.kind == "sentinel" else SingleRoute(target)


class SingleRoute:
    """One server."""

    by_key = False

    def __init__(self, target: Target) -> None:
        self._node = target.nodes[0]

    def node_for(self, key: bytes | None) -> Exchanges[Node]:
        return self._node
        yield

    def known_node(self, key: bytes) -> Node | None:
        return self._node

    def forget(self) -> None:
        """Nothing to drop: there is one address. A new connection may reach another server behind it."""

    def suspect_failover(self) -> None:
        """Nothing to drop: there is one address."""

    def moved(self, slot: int, node: Node) -> None:
        """The server is a node of a cluster: the redirection is followed for this command only."""

    def primaries(self) -> Exchanges[list[Node]]:
        return [self._node]
        yield


class SentinelRoute:
    """Asks the sentinels in turn. The one that answered is asked first the next time, unless its answer was wrong."""

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
        failures: list[str] = []
        for sentinel in self._sentinels:
            try:
                (reply,) = yield Exchange(sentinel, [(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service)])
                if isinstance(reply, ErrorReply) or not reply:
                    failures.append(f"{sentinel} knows no primary called {self._service.decode()!r}")
                    continue
                primary = Node(reply[0].decode(), int(reply[1]))
                # During a failover sentinels report the old primary for a while, so the node itself is asked for its
                # role.
                (role,) = yield Exchange(primary, [(b"ROLE",)])
            except (NotSent, NoAnswer) as error:
                failures.append(f"{sentinel}: {error}")
                continue
            if isinstance(role, ErrorReply) or role[0] == b"master":
                # Replace the list, never change it: threads share the route.
                self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
                return primary
            failures.append(f"{sentinel} reports {primary} as primary, which reports its role as {role[0].decode()}")
        raise NotSent("; ".join(failures))

    def forget(self) -> None:
        self._primary = None

    def suspect_failover(self) -> None:
        if self._primary is not None:  # otherwise another call did this already
            self._primary = None
            first, *others = self._sentinels
            self._sentinels = [*others, first]

    def moved(self, slot: int, node: Node) -> None:
        self._primary = None

    def primaries(self) -> Exchanges[list[Node]]:
        return [(yield from self.node_for(None))]


class ClusterRoute:
    """Keeps the slot table. MOVED corrects one slot; after a node is lost the table is read again."""

    by_key = True

    def __init__(self, target: Target) -> None:
        self._seeds = list(target.nodes)
        self._owners: list[Node | None] = []
        self._table_source: Node | None = None
        """The node that returned the slot table."""

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
        failures: list[str] = []
        for seed in list(dict.fromkeys(self._seeds)):
            try:
                (reply,) = yield Exchange(seed, [(b"CLUSTER", b"SLOTS")])
            except (NotSent, NoAnswer) as error:
                failures.append(f"{seed}: {error}")
                continue
            if isinstance(reply, ErrorReply):
                if reply.text.startswith(NO_CLUSTER):
                    raise InvalidArgument(
                        "url", f"redis+cluster:// for {seed}", "redis://: that server is not in cluster mode"
                    )
                failures.append(f"{seed}: {reply.text}")
                continue
            owners: list[Node | None] = [None] * SLOTS
            for first, last, primary, *_ in reply:
                # An empty host means the node that was asked.
                node = Node(primary[0].decode() if primary[0] else seed.host, primary[1])
                owners[first : last + 1] = [node] * (last - first + 1)
            self._remember(filter(None, owners))
            self._table_source = seed
            return owners
        raise NotSent("; ".join(failures))

    def _remember(self, nodes: Iterable[Node]) -> None:
        """Adds the nodes of the table to the seeds, because the configured nodes may all be replaced later."""
        self._seeds = list(dict.fromkeys([*self._seeds, *nodes]))[-64:]

    def forget(self) -> None:
        self._owners = []

    def suspect_failover(self) -> None:
        self._owners = []
        self._seeds = sorted(self._seeds, key=lambda seed: seed == self._table_source)  # stable: moves it to the end

    def moved(self, slot: int, node: Node) -> None:
        if self._owners:
            self._owners[slot] = node

    def primaries(self) -> Exchanges[list[Node]]:
        yield from self.node_for(None)
        return list(dict.fromkeys(filter(None, self._owners)))
