"""Set-ups of several servers for tests: a primary with replica and sentinels, and a cluster of three primaries."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millstream.broker import BlockingBroker, open_blocking_broker
from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.testing.servers import RedisProcess, free_port
from millstream.testing.waiting import wait_until
from millstream.wire import Command

SETTLING_S = 60.0


def ask(server: RedisProcess, *words: str | bytes) -> Any:
    """One command to one server, and its raw reply."""
    with open_blocking_broker(server.url) as broker:
        return say(broker, *words)


def say_to(server: RedisProcess, password: str, *words: str | bytes) -> Any:
    """``ask`` with a login."""
    login = f":{password}@" if password else ""
    with open_blocking_broker(f"redis://{login}127.0.0.1:{server.port}") as broker:
        return say(broker, *words)


def say(broker: BlockingBroker, *words: str | bytes) -> Any:
    return broker.link.call(Command(tuple(word.encode() if isinstance(word, str) else word for word in words)))


DOWN_AFTER_MS = 3_000
"""So long that a machine which is busy for a moment has no failover of its own."""


class SentinelSetup:
    """One primary, one replica or more, three sentinels that call them ``millstream`` and take for dead what has said
    nothing for ``DOWN_AFTER_MS``."""

    def __init__(self, *, password: str = "", replicas: int = 1) -> None:
        self._password = password
        locked = ["--requirepass", password, "--masterauth", password] if password else []
        self.primary = RedisProcess([*locked, "--repl-diskless-sync-delay", "0"])
        following = ["--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", str(self.primary.port)]
        self.replicas = [RedisProcess([*locked, *following]) for _ in range(replicas)]
        self.replica = self.replicas[0]
        self.sentinels: list[RedisProcess] = []
        self._directory = tempfile.TemporaryDirectory(prefix="millstream-sentinel-")

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        login = f":{self._password}@" if self._password else ""
        return f"redis+sentinel://{login}{places}/millstream"

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            for replica in self.replicas:
                replica.start()
            for number in range(3):
                self.sentinels.append(self._sentinel(number))
            wait_until(self._settled, what="the sentinels to know each other and the replica", timeout_s=SETTLING_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _sentinel(self, number: int) -> RedisProcess:
        directory = Path(self._directory.name) / str(number)
        directory.mkdir()
        login = f"sentinel auth-pass millstream {self._password}\n" if self._password else ""
        (directory / "sentinel.conf").write_text(
            f"sentinel monitor millstream 127.0.0.1 {self.primary.port} 2\n{login}"
            f"sentinel down-after-milliseconds millstream {DOWN_AFTER_MS}\n"
            "sentinel failover-timeout millstream 3000\n"
        )
        return RedisProcess(["--sentinel"], directory=str(directory), sentinel=True).start()

    def _settled(self) -> bool:
        for sentinel in self.sentinels:
            flat = ask(sentinel, "SENTINEL", "MASTER", "millstream")
            facts = dict(zip(flat[::2], flat[1::2], strict=True))
            if facts[b"num-other-sentinels"] != b"2" or facts[b"num-slaves"] != b"%d" % len(self.replicas):
                return False
        return all("MASTER <-> REPLICA sync: Finished with success" in replica.log for replica in self.replicas)

    def failover(self) -> None:
        """Kills the primary as a crash does, and returns when the sentinels name another one: of several replicas that
        have the same, whichever they like."""
        self.primary.kill()
        before = self.primary.port
        wait_until(
            lambda: self.primary_port() not in (0, before),
            what="the sentinels to promote a replica",
            timeout_s=SETTLING_S,
        )
        promoted, known = self.primary_port(), [replica.port for replica in self.replicas]
        assert promoted in known, f"they promoted {promoted}, which is none of {known}"

    def switch(self) -> int:
        """A planned failover, as an operator asks a sentinel for it. Returns the new primary's port, when the sentinels
        agree and all the others follow it."""
        before = self.primary_port()
        wait_until(self.ask_to_switch, what="a sentinel to begin a failover", timeout_s=SETTLING_S)
        wait_until(lambda: self.primary_port() not in (0, before), what="another primary", timeout_s=SETTLING_S)
        wait_until(self._following, what="all replicas to follow the new primary", timeout_s=SETTLING_S)
        return self.primary_port()

    def ask_to_switch(self) -> bool:
        """Asks once for a planned failover; whether a sentinel has begun one."""
        try:
            return bool(ask(self.sentinels[0], "SENTINEL", "FAILOVER", "millstream") == b"OK")
        except MillstreamError:  # the last one is not over, or no replica is good enough yet
            time.sleep(0.2)
            return False

    def primary_port(self) -> int:
        """What all sentinels agree on; 0 while they do not."""
        named = {ask(one, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "millstream")[1] for one in self.sentinels}
        return int(named.pop()) if len(named) == 1 else 0

    def _following(self) -> bool:
        port = self.primary_port()
        for server in (self.primary, *self.replicas):
            try:
                role = say_to(server, self._password, "ROLE")
            except BrokerUnavailable:  # whoever changes its role cuts its clients off
                return False
            if (role[0] != b"master") if server.port == port else (role[0] != b"slave" or role[3] != b"connected"):
                return False
        return bool(port)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (*self.sentinels, *self.replicas, self.primary):
            server.stop()
        self._directory.cleanup()


class ClusterSetup:
    """Three primaries that share the slots. ``options`` are those of each redis-server."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options
        self._bus = [free_port() for _ in range(3)]
        self.nodes = [self._node(bus) for bus in self._bus]

    def _node(self, bus: int) -> RedisProcess:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(bus)]
        # A primary whose last slot moves away stays one, and can be given slots again.
        return RedisProcess([*options, "--cluster-allow-replica-migration", "no", *self._options])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _join(self) -> None:
        first = self.nodes[0]
        share = 16384 // len(self.nodes) + 1
        for number, node in enumerate(self.nodes):
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            ask(node, "CLUSTER", "ADDSLOTSRANGE", str(number * share), str(min((number + 1) * share, 16384) - 1))
            if node is not first:
                ask(node, "CLUSTER", "MEET", "127.0.0.1", str(first.port), str(self._bus[0]))
        wait_until(self._formed, what="the cluster to form", timeout_s=SETTLING_S)

    def _formed(self) -> bool:
        """Every node knows who owns every slot."""
        for node in self.nodes:
            facts: bytes = ask(node, "CLUSTER", "INFO")
            if b"cluster_state:ok" not in facts or len(ask(node, "CLUSTER", "SLOTS")) != len(self.nodes):
                return False
        return True

    def restart(self, node: RedisProcess) -> None:
        """A node that was killed, from what it has on disk. Returns when everybody believes in it again."""
        node.start()
        wait_until(self._formed, what="the cluster to have its node again", timeout_s=SETTLING_S)

    def add_node(self) -> RedisProcess:
        """One more primary, without slots and without memory. Returns when everybody knows it."""
        bus = free_port()
        fresh = self._node(bus).start()
        self.nodes.append(fresh)
        ask(fresh, "CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port), str(self._bus[0]))
        name = self.node_id(fresh).encode()

        def known() -> bool:
            return all(
                name in ask(node, "CLUSTER", "NODES") and b"cluster_state:ok" in ask(node, "CLUSTER", "INFO")
                for node in self.nodes
            )

        wait_until(known, what="the cluster to know its new node", timeout_s=SETTLING_S)
        return fresh

    def node_id(self, node: RedisProcess) -> str:
        answer: bytes = ask(node, "CLUSTER", "MYID")
        return answer.decode()

    def owner(self, slot: int) -> RedisProcess:
        for first, last, primary, *_ in ask(self.nodes[0], "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise LookupError(slot)

    def move(self, slot: int, target: RedisProcess, *, between: Callable[[], None] = lambda: None) -> None:
        """A reshard of one slot as tools do it: key after key, while both nodes answer for the slot; ``between`` is
        called after each."""
        source = self.begin_move(slot, target)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "1"):
            ask(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
            between()
        self.end_move(slot, target)

    def begin_move(self, slot: int, target: RedisProcess) -> RedisProcess:
        """The slot is on its way: its present owner answers ASK for keys that it does not have."""
        source = self.owner(slot)
        ask(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", self.node_id(source))
        ask(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", self.node_id(target))
        return source

    def end_move(self, slot: int, target: RedisProcess) -> None:
        """The slot is there, its keys too: everybody else answers MOVED."""
        source = self.owner(slot)
        keys: list[bytes] = ask(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "1000")
        if keys:
            ask(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
        for node in (target, source, *self.nodes):
            ask(node, "CLUSTER", "SETSLOT", str(slot), "NODE", self.node_id(target))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.stop()
