"""From a redis-py client that the caller already has to a target: its settings are taken, its connections never."""

from __future__ import annotations

from typing import Any

from millstream.broker.links.nodes import Node, Target
from millstream.errors import InvalidArgument

KEPT = (
    "db",
    "username",
    "password",
    "client_name",
    "credential_provider",
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_check_hostname",
    "ssl_min_version",
    "ssl_ciphers",
)
"""What makes a connection this user's; retries, timeouts and decoding are the broker's own affair."""


def target_of_client(client: Any) -> Target:
    """Takes redis.Redis, redis.asyncio.Redis (Sentinel's too), redis.RedisCluster and redis.asyncio.RedisCluster."""
    pool = getattr(client, "connection_pool", None)
    if pool is not None and getattr(pool, "sentinel_manager", None) is not None:
        return _sentinel(pool)
    if pool is not None:
        settings = pool.connection_kwargs
        place = settings.get("path")
        node = Node("", 0, place) if place else Node(settings.get("host", "localhost"), int(settings.get("port", 6379)))
        return Target("single", (node,), tls=_tls(pool.connection_class), options=_kept(settings))
    nodes = getattr(client, "nodes_manager", None)
    if nodes is not None:
        settings = dict(getattr(nodes, "connection_kwargs", None) or getattr(client, "connection_kwargs", None) or {})
        starts = tuple(Node(node.host, int(node.port)) for node in nodes.startup_nodes.values())
        kind = settings.get("connection_class") or getattr(nodes, "connection_pool_class", None)
        tls = _tls(kind) or bool(settings.get("ssl"))
        return Target("cluster", starts, tls=tls, options={k: v for k, v in _kept(settings).items() if k != "db"})
    raise InvalidArgument("url", type(client).__name__, "a URL, or a client of redis-py")


def _sentinel(pool: Any) -> Target:
    manager = pool.sentinel_manager
    nodes: list[Node] = []
    sentinel_options: dict[str, Any] = {}
    for sentinel in manager.sentinels:
        settings = sentinel.connection_pool.connection_kwargs
        nodes.append(Node(settings.get("host", "localhost"), int(settings.get("port", 26379)), kind="sentinel"))
        sentinel_options = _kept(settings)
    sentinel_options.pop("db", None)
    return Target(
        "sentinel", tuple(nodes), pool.service_name, _tls(pool.connection_class), _kept(pool.connection_kwargs),
        sentinel_options,
    )  # fmt: skip


def _tls(kind: Any) -> bool:
    return "SSL" in getattr(kind, "__name__", "")


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in KEPT if settings.get(name) is not None}
