"""Parses a URL, or a client of redis-py, into the servers and the options of a connection to them.

Secrets are removed from texts only here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream.errors import InvalidArgument


class Node(NamedTuple):
    """One server. ``kind`` decides the options of a connection: sentinels have their own credentials."""

    host: str
    port: int
    path: str = ""
    """The path of a unix socket; then host and port are unused."""
    kind: Literal["data", "sentinel"] = "data"

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class NodeName(bytes):
    """``host:port`` instead of the key of a command: sends it to this node."""

    def node(self) -> Node:
        host, _, port = self.decode().rpartition(":")
        return Node(host, int(port))


@dataclass(frozen=True, slots=True)
class Target:
    """The servers that a URL, or a redis-py client, describes. Its repr contains no options, so no secrets."""

    kind: Literal["single", "sentinel", "cluster"]
    nodes: tuple[Node, ...]
    """The server; or the sentinels; or the nodes of a cluster to ask first."""
    service: str = ""
    tls: bool = False
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """redis-py's keyword arguments for a connection: credentials, database, certificates."""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def options_for(self, node: Node) -> dict[str, Any]:
        location = {"path": node.path} if node.path else {"host": node.host, "port": node.port}
        return {**(self.sentinel_options if node.kind == "sentinel" else self.options), **location}

    def __str__(self) -> str:
        where = ",".join(map(str, self.nodes))
        return f"{where} ({self.kind} {self.service})" if self.service else where


SCHEMES = (
    "local://, local://name, local:///path, redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, "
    "redis+cluster:// or rediss+cluster://"
)
OPTIONS: dict[str, type] = {
    "db": int,
    "username": str,
    "password": str,
    "client_name": str,
    "ssl_cert_reqs": str,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_check_hostname": bool,
    "sentinel_username": str,
    "sentinel_password": str,
}
"""The query options of a URL, with the names of redis-py. Timeouts are in Limits."""


def redacted(url: str) -> str:
    """The URL without secrets, for errors, logs and reprs."""
    # Up to the last @, because an unquoted password may contain any character, also @ and /. Slashes after the scheme
    # may be missing, because invalid URLs are shown in errors too.
    url = re.sub(r"(?:(?<=://)|(?<=:/)(?!/)|(?<=:)(?!/)).*@", "***@", url, count=1, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])[a-z_]*password=)[^&]*", r"\1***", url)


def target_of(url: str) -> Target:
    """Parses redis://, rediss://, unix://, redis+sentinel:// and redis+cluster:// URLs; the latter two also with
    rediss.
    """
    try:
        if "://" not in url:
            raise InvalidArgument("url", redacted(url), "a scheme and two slashes, as in redis://localhost:6379")
        parts = urlsplit(url)
        scheme, plus, kind = parts.scheme.partition("+")
        if scheme not in ("redis", "rediss", "unix") or kind not in ("", "sentinel", "cluster") or (plus and not kind):
            raise InvalidArgument("url", redacted(url), SCHEMES)
        if scheme == "unix" and kind:
            raise InvalidArgument("url", redacted(url), SCHEMES)
        options = _query(url, parts.query)
        options |= _credentials(parts.netloc)
        tls = scheme == "rediss"
        if any(name.startswith("ssl_") for name in options) and not tls:
            raise InvalidArgument("url", redacted(url), "rediss:// together with ssl_ options")
        if scheme == "unix":
            if not parts.path:
                raise InvalidArgument("url", redacted(url), "unix:///path/to/socket")
            return Target("single", (Node("", 0, unquote(parts.path)),), options=options)
        nodes = _nodes(parts.netloc, 26379 if kind == "sentinel" else 6379)
        path = [unquote(part) for part in parts.path.split("/") if part]
    except ValueError:
        allowed = "a well-formed URL such as redis://user:password@host:6379/0, with a port from 1 to 65535"
        raise InvalidArgument("url", redacted(url), allowed) from None
    if kind == "sentinel":
        return _sentinel_target(url, nodes, path, options, tls)
    if len(nodes) > 1 and kind != "cluster":
        raise InvalidArgument("url", redacted(url), "one host, or redis+cluster:// or redis+sentinel:// for several")
    if path:
        options.setdefault("db", _database(url, path))
    if kind == "cluster":
        if options.pop("db", 0):
            raise InvalidArgument("url", redacted(url), "database 0: a cluster has no other")
        return Target("cluster", nodes, tls=tls, options=options)
    return Target("single", nodes, tls=tls, options=options)


def _sentinel_target(url: str, nodes: tuple[Node, ...], path: list[str], options: dict[str, Any], tls: bool) -> Target:
    if not path:
        raise InvalidArgument("url", redacted(url), "redis+sentinel://host:26379,host:26379/service-name/0")
    if path[1:]:
        options.setdefault("db", _database(url, path[1:]))
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinel_options = {name: value for name, value in own.items() if value is not None}
    sentinel_options |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    sentinels = tuple(node._replace(kind="sentinel") for node in nodes)
    return Target("sentinel", sentinels, path[0], tls, options, sentinel_options)


def _database(url: str, path: list[str]) -> int:
    if len(path) != 1 or not (path[0].isascii() and path[0].isdigit() and len(path[0]) < 10):
        raise InvalidArgument("url", redacted(url), "a database number as the last part of the path")
    return int(path[0])


def _credentials(netloc: str) -> dict[str, Any]:
    user_info, at, _ = netloc.rpartition("@")
    if not at:
        return {}
    user, _, password = user_info.partition(":")
    credentials = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}


def _nodes(netloc: str, default_port: int) -> tuple[Node, ...]:
    nodes = []
    for address in netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{address}")
        if parts.port == 0:
            raise ValueError("port 0 is not valid")
        nodes.append(Node(parts.hostname or "localhost", parts.port or default_port))
    return tuple(nodes)


def _query(url: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        kind = OPTIONS.get(name)
        if kind is None:
            raise InvalidArgument("url", f"...?{name}=", f"one of the options {', '.join(sorted(OPTIONS))}")
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise InvalidArgument("url", f"...?{name}={text}", "true or false")
            options[name] = text.lower() == "true"
        elif kind is int:
            options[name] = _database(url, [text])
        else:
            options[name] = text
    return options


CLIENT_OPTIONS = (
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
"""The options that are taken from a redis-py client; retries, timeouts and decoding are the broker's."""


def target_of_client(client: Any) -> Target:
    """Parses redis.Redis, redis.asyncio.Redis (also from Sentinel), redis.RedisCluster and
    redis.asyncio.RedisCluster.
    """
    pool = getattr(client, "connection_pool", None)
    if pool is not None and getattr(pool, "sentinel_manager", None) is not None:
        return _sentinel(pool)
    if pool is not None:
        settings = pool.connection_kwargs
        path = settings.get("path")
        node = Node("", 0, path) if path else Node(settings.get("host", "localhost"), int(settings.get("port", 6379)))
        return Target("single", (node,), tls=_tls(pool.connection_class), options=_client_options(settings))
    nodes = getattr(client, "nodes_manager", None)
    if nodes is not None:
        settings = dict(getattr(nodes, "connection_kwargs", None) or getattr(client, "connection_kwargs", None) or {})
        starts = tuple(Node(node.host, int(node.port)) for node in nodes.startup_nodes.values())
        kind = settings.get("connection_class") or getattr(nodes, "connection_pool_class", None)
        tls = _tls(kind) or bool(settings.get("ssl"))
        return Target(
            "cluster", starts, tls=tls, options={k: v for k, v in _client_options(settings).items() if k != "db"}
        )
    raise InvalidArgument("url", type(client).__name__, "a URL, or a client of redis-py")


def _sentinel(pool: Any) -> Target:
    manager = pool.sentinel_manager
    nodes: list[Node] = []
    sentinel_options: dict[str, Any] = {}
    for sentinel in manager.sentinels:
        settings = sentinel.connection_pool.connection_kwargs
        nodes.append(Node(settings.get("host", "localhost"), int(settings.get("port", 26379)), kind="sentinel"))
        sentinel_options = _client_options(settings)
    sentinel_options.pop("db", None)
    return Target(
        "sentinel",
        tuple(nodes),
        pool.service_name,
        _tls(pool.connection_class),
        _client_options(pool.connection_kwargs),
        sentinel_options,
    )


def _tls(kind: Any) -> bool:
    return "SSL" in getattr(kind, "__name__", "")


def _client_options(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in CLIENT_OPTIONS if settings.get(name) is not None}
