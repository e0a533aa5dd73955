"""URLs: the servers that they select, invalid ones, and secrets, which are never printed."""

from __future__ import annotations

import pickle

import pytest

from millstream import open_blocking_broker, open_broker
from millstream.broker.transport.local_address import address_of
from millstream.broker.transport.targets import Node, redacted, target_of
from millstream.errors import InvalidArgument


def test_one_server() -> None:
    target = target_of("redis://user:p%40ss@example:7000/3?client_name=me")

    assert (target.kind, target.nodes, target.tls) == ("single", (Node("example", 7000),), False)
    assert target.options == {"username": "user", "password": "p@ss", "db": 3, "client_name": "me"}
    assert target_of("redis://").nodes == (Node("localhost", 6379),)
    assert target_of("redis://[::1]:7").nodes == (Node("::1", 7),)
    assert target_of("redis://:only@h").options == {"password": "only"}


def test_tls() -> None:
    target = target_of("rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")

    assert target.tls
    assert target.options == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}


def test_unix_socket() -> None:
    target = target_of("unix://user:pw@/var/run/redis.sock?db=2")

    assert target.nodes == (Node("", 0, "/var/run/redis.sock"),)
    assert target.options == {"username": "user", "password": "pw", "db": 2}


def test_sentinels() -> None:
    target = target_of("redis+sentinel://:pw@a:1,b,[::1]:3/orders/4?sentinel_password=other")

    assert target.nodes == tuple(Node(*place, kind="sentinel") for place in (("a", 1), ("b", 26379), ("::1", 3)))
    assert (target.kind, target.service) == ("sentinel", "orders")
    assert target.options == {"password": "pw", "db": 4}
    assert target.sentinel_options == {"password": "other"}


def test_cluster_url_is_parsed() -> None:
    target = target_of("rediss+cluster://user:pw@a:1,b:2")

    assert (target.kind, target.tls, target.nodes) == ("cluster", True, (Node("a", 1), Node("b", 2)))


@pytest.mark.parametrize(
    "url",
    [
        *("http://h", "h:6379", "", "redis", "redis+://h", "redis+ring://h", "unix+cluster://h", "REDIS+x://h"),
        *("redis://a,b", "redis://h/x", "redis://h/1/2", "redis://h:port", "redis://h:99999999"),
        *("redis+sentinel://h", "redis+cluster://h/1", "redis://h?timeout=5", "redis://h?db=x", "redis://h?db"),
        *("redis://h?ssl_ca_certs=/x", "rediss://h?ssl_check_hostname=perhaps", "redis://[::1"),
    ],
)
def test_invalid_url_is_rejected(url: str) -> None:
    for open_it in (open_broker, open_blocking_broker):
        with pytest.raises(InvalidArgument) as caught:
            open_it(url)
        assert caught.value.argument == "url"


@pytest.mark.parametrize(
    "url", ["local:name", "local:", "local://a/b", "local:///", "local://?x=1", "local:///p?appendfsync=often"]
)
def test_invalid_local_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidArgument):
        open_broker(url)


def test_local_url_is_parsed() -> None:
    assert address_of("local://").key == ("", "")
    assert address_of("local://orders").key == ("orders", "")
    assert address_of("local:///tmp/../tmp/x").key == address_of("local:///tmp/x?appendfsync=always").key


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@h/1",
        "redis://h?password=hunter2&db=0",
        "redis+sentinel://:hunter2@a,b/s?sentinel_password=hunter2",
        "redis://user:hunter2@h/x",
        "nosuch://user:hunter2@h",
        "redis://user:hunter2@h:port",
        "redis://h/x?password=hunter2",
        "redis://user:p@hunter2@h",
        "nosuch://user:p@hunter2@h",
        "redis://user:p/hunter2@h:1/0",
        "redis://user:p?hunter2@h",
        "redis:/user:hunter2@h",
        "redis:user:hunter2@h",
        "user:hunter2@h:6379",
        "local:///data?password=hunter2",
        "local://user:hunter2@h/0",
    ],
)
def test_secrets_are_redacted(url: str) -> None:
    assert "hunter2" not in redacted(url)
    try:
        broker = open_broker(url)
    except InvalidArgument as error:
        text = f"{error} {error!r} {error.__cause__!r} {pickle.dumps(error)!r}"
    else:
        text = f"{broker!r} {broker.transport.target!r} {broker.transport.target}"  # type: ignore[attr-defined]  # a RedisLink
    assert "hunter2" not in text


@pytest.mark.parametrize("bad", [0, -1, 1.5, "10", True])
def test_max_stream_len(bad: object) -> None:
    with pytest.raises(InvalidArgument):
        open_broker("local://", max_stream_len=bad)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert open_blocking_broker("local://defaults").context.max_stream_len == 10_000
    assert open_blocking_broker("local://defaults", max_stream_len=None).context.max_stream_len is None
    assert open_blocking_broker("redis://h").context.max_stream_len is None


@pytest.mark.parametrize(
    "url",
    ["redis://h:0", "unix://", "redis://h/\u00b2", "redis://h?db=\u0661", f"redis://h/{'9' * 5000}", "redis://h:x"],
)
def test_url_with_unknown_scheme_or_host_is_rejected(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url"):
        target_of(url)
