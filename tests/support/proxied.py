"""Proxies in front of a server, or of each node of a cluster, that no client can bypass.

Nodes of a cluster announce the addresses of other nodes, and clients connect to these directly. So these nodes announce
only their ports (``unnamed``): clients then use the address at which they reached the first node. A set of proxies has
an address of its own, with the ports of the nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, Self, TypeVar

from millstream.testing import AnsweringProxy, ClusterSetup, RedisProcess
from millstream.testing.answering import Choice, pass_on
from millstream.testing.topologies import ask

Servers = RedisProcess | ClusterSetup
_addresses = (f"127.0.0.{number}" for number in itertools.cycle(range(2, 255)))


class Proxy(Protocol):
    @property
    def url(self) -> str: ...


P = TypeVar("P", bound=Proxy)


@contextmanager
def unnamed(cluster: ClusterSetup) -> Iterator[ClusterSetup]:
    """A cluster whose nodes announce only ports, and no host names."""
    setting = "cluster-preferred-endpoint-type"
    for node in cluster.nodes:
        ask(node, "CONFIG", "SET", setting, "unknown-endpoint")
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            ask(node, "CONFIG", "SET", setting, "ip")


def each(servers: Servers) -> list[RedisProcess]:
    return servers.nodes if isinstance(servers, ClusterSetup) else [servers]


def before(servers: Servers, make: Callable[..., P]) -> list[P]:
    """Creates a proxy with ``make(port, listen=...)`` for each server."""
    if isinstance(servers, RedisProcess):
        return [make(servers.port)]
    address = next(_addresses)
    return [make(node.port, listen=(address, node.port)) for node in servers.nodes]


def url_through(servers: Servers, proxies: list[P]) -> str:
    """The URL through the proxies; call it when they listen."""
    if isinstance(servers, RedisProcess):
        return proxies[0].url
    return "redis+cluster://" + ",".join(proxy.url.removeprefix("redis://") for proxy in proxies)


class AnsweringProxies:
    """``AnsweringProxy`` before each of the servers, all with the same ``choose``."""

    def __init__(self, servers: Servers, choose: Choice = pass_on) -> None:
        self._servers = servers
        self._choose = choose
        self._proxies = before(servers, AnsweringProxy)
        self._open = ExitStack()

    @property
    def choose(self) -> Choice:
        return self._choose

    @choose.setter
    def choose(self, choose: Choice) -> None:
        self._choose = choose
        for proxy in self._proxies:
            proxy.choose = choose

    @property
    def url(self) -> str:
        return url_through(self._servers, self._proxies)

    @property
    def place(self) -> str:
        """``host:port`` of the first of them."""
        return self._proxies[0].url.removeprefix("redis://")

    def __enter__(self) -> Self:
        self.choose = self._choose
        for proxy in self._proxies:
            self._open.enter_context(proxy)
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def cut_all(self) -> None:
        for proxy in self._proxies:
            proxy.cut_all()
