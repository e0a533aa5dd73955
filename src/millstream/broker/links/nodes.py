"""Servers by name: where they are, and what a connection to them needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class Node(NamedTuple):
    """One server. ``kind`` decides which options a connection gets: sentinels have credentials of their own."""

    host: str
    port: int
    path: str = ""
    """A unix socket's; then host and port say nothing."""
    kind: Literal["data", "sentinel"] = "data"

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class NodeName(bytes):
    """``host:port`` in the place of a command's key: this very node, whatever it holds."""

    def node(self) -> Node:
        host, _, port = self.decode().rpartition(":")
        return Node(host, int(port))


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL, or a redis-py client, points at. Its repr shows no secret, for it shows no options."""

    kind: Literal["single", "sentinel", "cluster"]
    nodes: tuple[Node, ...]
    """The server; or the sentinels; or the nodes of a cluster to ask first."""
    service: str = ""
    tls: bool = False
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """redis-py's keyword arguments for a connection: credentials, database, certificates."""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def options_for(self, node: Node) -> dict[str, Any]:
        place = {"path": node.path} if node.path else {"host": node.host, "port": node.port}
        return {**(self.sentinel_options if node.kind == "sentinel" else self.options), **place}

    def __str__(self) -> str:
        where = ",".join(map(str, self.nodes))
        return f"{where} ({self.kind} {self.service})" if self.service else where
