"""From a URL, or a redis-py client, to a target. Secrets are taken out of texts here, and nowhere else."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream.broker.links.nodes import Node, Target
from millstream.errors import InvalidArgument

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
"""What may stand behind the question mark, as redis-py spells it. Timeouts are in Limits."""


def redacted(url: str) -> str:
    """The URL without what is secret in it, fit for errors, logs and reprs."""
    # Up to the last @: a password that was not quoted may hold any character, an @ or a slash among them.
    url = re.sub(r"(?<=://).*@", "***@", url, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])[a-z_]*password=)[^&]*", r"\1***", url)


def target_of(url: str) -> Target:
    """Reads redis://, rediss://, unix://, redis+sentinel:// and redis+cluster:// URLs, the latter with ``s`` too."""
    try:
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
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _nodes(netloc: str, default_port: int) -> tuple[Node, ...]:
    nodes = []
    for place in netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{place}")
        if parts.port == 0:
            raise ValueError("nobody listens on port 0")
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
