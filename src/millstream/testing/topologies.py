"""Groups of servers for tests: a primary with replicas and sentinels, and a cluster of three primaries."""

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

SETTLE_TIMEOUT_S = 60.0


def ask(server: RedisProcess, *args: str | bytes) -> Any:
    """Sends one command to one server, and returns the raw reply."""
    with open_blocking_broker(server.url) as broker:
        return send_command(broker, *args)


def ask_with_password(server: RedisProcess, password: str, *args: str | bytes) -> Any:
    """``ask`` with a login."""
    login = f":{password}@" if password else ""
    with open_blocking_broker(f"redis://{login}127.0.0.1:{server.port}") as broker:
        return send_command(broker, *args)


def send_command(broker: BlockingBroker, *args: str | bytes) -> Any:
    return broker.transport.call(Command(tuple(arg.encode() if isinstance(arg, str) else arg for arg in args)))


DOWN_AFTER_MS = 3_000
"""Long enough that a short pause of a busy machine causes no failover."""


class SentinelSetup:
    """A primary, replicas, and three sentinels that monitor them as ``millstream`` with a timeout of
    ``DOWN_AFTER_MS``."""

    def __init__(self, *, password: str = "", replicas: int = 1) -> None:
        self._password = password
        auth_options = ["--requirepass", password, "--masterauth", password] if password else []
        self.primary = RedisProcess([*auth_options, "--repl-diskless-sync-delay", "0"])
        following = ["--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", str(self.primary.port)]
        self.replicas = [RedisProcess([*auth_options, *following]) for _ in range(replicas)]
        self.replica = self.replicas[0]
        self.sentinels: list[RedisProcess] = []
        self._directory = tempfile.TemporaryDirectory(prefix="millstream-sentinel-")

    @property
    def url(self) -> str:
        addresses = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        login = f":{self._password}@" if self._password else ""
        return f"redis+sentinel://{login}{addresses}/millstream"

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            for replica in self.replicas:
                replica.start()
            for number in range(3):
                self.sentinels.append(self._sentinel(number))
            wait_until(
                self._is_settled, what="the sentinels to know each other and the replica", timeout_s=SETTLE_TIMEOUT_S
            )
        except BaseException:  # also after Ctrl-C: no server may stay behind
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

    def _is_settled(self) -> bool:
        for sentinel in self.sentinels:
            flat = ask(sentinel, "SENTINEL", "MASTER", "millstream")
            info = dict(zip(flat[::2], flat[1::2], strict=True))
            if info[b"num-other-sentinels"] != b"2" or info[b"num-slaves"] != b"%d" % len(self.replicas):
                return False
        return all("MASTER <-> REPLICA sync: Finished with success" in replica.log for replica in self.replicas)

    def failover(self) -> None:
        """Kills the primary like a crash, and returns when the sentinels report another one (any of the replicas)."""
        self.primary.kill()
        before = self.primary.port
        wait_until(
            lambda: self.primary_port() not in (0, before),
            what="the sentinels to promote a replica",
            timeout_s=SETTLE_TIMEOUT_S,
        )
        promoted, known = self.primary_port(), [replica.port for replica in self.replicas]
        assert promoted in known, f"the sentinels promoted {promoted}, which is not one of {known}"

    def switch(self) -> int:
        """Starts a planned failover. Returns the port of the new primary when the sentinels agree and all other servers
        replicate from it."""
        before = self.primary_port()
        wait_until(self.request_failover, what="a sentinel to begin a failover", timeout_s=SETTLE_TIMEOUT_S)
        wait_until(lambda: self.primary_port() not in (0, before), what="another primary", timeout_s=SETTLE_TIMEOUT_S)
        wait_until(self._following, what="all replicas to follow the new primary", timeout_s=SETTLE_TIMEOUT_S)
        return self.primary_port()

    def request_failover(self) -> bool:
        """Requests a planned failover. Returns whether a sentinel has started one."""
        try:
            return bool(ask(self.sentinels[0], "SENTINEL", "FAILOVER", "millstream") == b"OK")
        except MillstreamError:  # the previous failover has not ended, or no replica is suitable yet
            time.sleep(0.2)
            return False

    def primary_port(self) -> int:
        """The port of the primary; 0 while the sentinels disagree."""
        ports = {ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "millstream")[1] for sentinel in self.sentinels}
        return int(ports.pop()) if len(ports) == 1 else 0

    def _following(self) -> bool:
        port = self.primary_port()
        for server in (self.primary, *self.replicas):
            try:
                role = ask_with_password(server, self._password, "ROLE")
            except BrokerUnavailable:  # a server that changes its role disconnects its clients
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
    """Three primaries that share the slots. ``options`` are command-line options of each redis-server."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options
        self._bus_ports = [free_port() for _ in range(3)]
        self.nodes = [self._node(bus) for bus in self._bus_ports]

    def _node(self, bus: int) -> RedisProcess:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(bus)]
        # A primary without slots stays a primary, so that slots can be moved to it.
        return RedisProcess([*options, "--cluster-allow-replica-migration", "no", *self._options])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:  # also after Ctrl-C: no server may stay behind
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
                ask(node, "CLUSTER", "MEET", "127.0.0.1", str(first.port), str(self._bus_ports[0]))
        wait_until(self._is_formed, what="the cluster to form", timeout_s=SETTLE_TIMEOUT_S)

    def _is_formed(self) -> bool:
        """Whether every node knows the owners of all slots."""
        for node in self.nodes:
            info: bytes = ask(node, "CLUSTER", "INFO")
            if b"cluster_state:ok" not in info or len(ask(node, "CLUSTER", "SLOTS")) != len(self.nodes):
                return False
        return True

    def restart(self, node: RedisProcess) -> None:
        """Restarts a killed node with its data on disk. Returns when all nodes consider the cluster complete."""
        node.start()
        wait_until(self._is_formed, what="the cluster to have its node again", timeout_s=SETTLE_TIMEOUT_S)

    def add_node(self) -> RedisProcess:
        """Adds an empty primary without slots. Returns when all nodes know it."""
        bus = free_port()
        fresh = self._node(bus).start()
        self.nodes.append(fresh)
        ask(fresh, "CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port), str(self._bus_ports[0]))
        name = self.node_id(fresh).encode()

        def known() -> bool:
            return all(
                name in ask(node, "CLUSTER", "NODES") and b"cluster_state:ok" in ask(node, "CLUSTER", "INFO")
                for node in self.nodes
            )

        wait_until(known, what="the cluster to know its new node", timeout_s=SETTLE_TIMEOUT_S)
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
        """Moves a slot as resharding tools do: key by key, while both nodes serve the slot. ``between`` is called after
        each key."""
        source = self.begin_move(slot, target)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "1"):
            ask(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *keys)
            between()
        self.end_move(slot, target)

    def begin_move(self, slot: int, target: RedisProcess) -> RedisProcess:
        """Starts to migrate a slot: its owner replies ASK for keys that it does not have."""
        source = self.owner(slot)
        ask(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", self.node_id(source))
        ask(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", self.node_id(target))
        return source

    def end_move(self, slot: int, target: RedisProcess) -> None:
        """Ends the migration of a slot: moves the remaining keys; the other nodes then reply MOVED."""
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
