"""Protocol errors of clients: they get the error of Redis, and only their own connection is closed."""

import random

import pytest
from raw_client import Client

from millstream.engine.journal.frames import pack
from millstream.server import ServerLimits
from millstream.testing.waiting import wait_until
from millstream.wire.requests import LINE_LIMIT, RequestLimits

MALFORMED = [
    b"*1\r\n:5\r\n",
    b"*2\r\n$4\r\nPING\r\n+x\r\n",
    b"*1\r\n*1\r\n$4\r\nPING\r\n",
    b"*x\r\n",
    b"*1\r\n$x\r\n",
    b"*1\r\n$-5\r\n",
    b"*1\r\n$536870913\r\n",
    b"*99999999999999999999\r\n",
    b"*4294967296\r\n",
    b'SET k "unbalanced\r\n',
    b"SET k 'a'b\r\n",
    b"x" * (LINE_LIMIT + 100),
    b"*" + b"1" * (LINE_LIMIT + 100),
    b"*1\r\n$" + b"1" * (LINE_LIMIT + 100),
]


@pytest.mark.parametrize("raw", MALFORMED, ids=lambda raw: repr(raw[:20]))
def test_malformed_request_gets_the_error_of_redis_and_closes_its_connection(raw, server, connect, redis_server):
    ours, theirs, bystander = connect(), Client(redis_server.port), connect()
    before = pack([b"SET", b"k", b"v"]) + b"GET k\r\n"
    for client in (ours, theirs):
        client.send_raw(before + raw)
    assert ours.rest() == theirs.rest()
    assert bystander.ask("PING") == b"PONG"
    theirs.close()


@pytest.mark.parametrize("verb", [b"POST / HTTP/1.1\r\n", b"Host: localhost\r\n", pack([b"post", b"/"])])
def test_http_request_is_disconnected_like_in_redis(verb, connect, redis_server):
    for client in (connect(), Client(redis_server.port)):
        client.send_raw(b"PING\r\n")
        assert client.take() == b"PONG"
        client.send_raw(verb + b"\r\nSET hacked 1\r\n")
        assert client.rest() == b""
        client.close()
    assert connect().ask("EXISTS", "hacked") == 0


@pytest.mark.parametrize(
    "commands",
    [
        [("EXEC", "x")],
        [("WATCH", "k"), ("EXEC", "x"), ("SET", "k", "1"), ("MULTI",), ("PING",), ("EXEC",)],
        [("MULTI",), ("SET", "k", "1"), ("EXEC", "x"), ("EXEC",), ("GET", "k")],
        [("MULTI",), ("SET", "k", "1"), ("DISCARD", "x"), ("EXEC",), ("GET", "k")],
        [("HSET", "h", "a", "1"), ("HSCAN", "h", ""), ("HSCAN", "nokey", ""), ("HSCAN", "h", "x")],
        [("SADD", "s", "a"), ("SSCAN", "s", ""), ("SSCAN", "nokey", "x")],
        [("SET", "k", "1"), ("SCAN", "")],
    ],
    ids=lambda commands: " ".join(commands[-1]),
)
def test_unusual_arguments_get_the_reply_of_redis(commands, connect, redis_server):
    with Client(redis_server.port) as theirs:
        ours = connect()
        for client in (ours, theirs):
            client.ask("FLUSHALL")
        for words in commands:
            assert ours.ask(*words) == theirs.ask(*words)


def test_inline_commands(connect):
    client = connect()
    client.send_raw(b'\r\n  \r\nSET "a key" "\\x41\\n" \n')
    assert client.take() == b"OK"
    client.send_raw(b"GET 'a key'\r\nPING\r\n")
    assert [client.take(), client.take()] == [b"A\n", b"PONG"]


def test_request_may_arrive_byte_by_byte(connect):
    client = connect()
    for byte in pack([b"SET", b"k", b"v" * 50]) + pack([b"STRLEN", b"k"]):
        client.send_raw(bytes([byte]))
    assert [client.take(), client.take()] == [b"OK", 50]


def test_large_values_and_deep_pipelines(connect):
    client = connect()
    value = random.randbytes(5 << 20)
    assert client.ask("SET", "big", value) == b"OK"
    assert client.ask("GET", "big") == value
    client.send_raw(pack([b"INCR", b"n"]) * 20_000)
    assert [client.take() for _ in range(20_000)] == list(range(1, 20_001))


def test_request_over_a_limit_names_the_limit(make_server, connect):
    limits = ServerLimits(request=RequestLimits(bulk_bytes=1000, args=5, request_bytes=2000))
    port = make_server(limits=limits).port
    for raw, text in [
        (b"*2\r\n$4\r\nECHO\r\n$1001\r\n", b"invalid bulk length"),
        (b"*6\r\n", b"invalid multibulk length"),
        (pack([b"MSET", b"a", b"x" * 1000, b"b", b"x" * 1000]), b"request over the limit of 2000 bytes"),
    ]:
        client = connect(port)
        client.send_raw(raw)
        assert client.rest() == b"-ERR Protocol error: " + text + b"\r\n"
    assert connect(port).ask("ECHO", "x" * 1000) == b"x" * 1000


def test_client_above_the_limit_gets_an_error(make_server, connect):
    port = make_server(limits=ServerLimits(clients=2)).port
    first, second = connect(port), connect(port)
    assert (first.ask("PING"), second.ask("PING")) == (b"PONG", b"PONG")
    assert connect(port).rest() == b"-ERR max number of clients reached\r\n"
    second.close()

    wait_until(lambda: _answers(connect, port), what="a free place")
    assert first.ask("PING") == b"PONG"


def _answers(connect, port):
    try:
        return connect(port).ask("PING") == b"PONG"
    except (EOFError, ConnectionError):
        return False


def test_pubsub_client_that_does_not_read_is_disconnected(make_server, connect):
    port = make_server(limits=ServerLimits(listener_output_bytes=1 << 20)).port
    deaf, speaker = connect(port), connect(port)
    assert deaf.ask("SUBSCRIBE", "news") == [b"subscribe", b"news", 1]
    wait_until(lambda: speaker.ask("PUBLISH", "news", "x" * 100_000) == 0, what="the subscriber to be cut off")
    assert speaker.ask("PING") == b"PONG"


def test_slow_client_is_paused_and_loses_nothing(make_server, connect, embedded):
    port = make_server(limits=ServerLimits(paused_output_bytes=100_000)).port
    client, other = connect(port), connect(port)
    client.ask("SET", "big", "x" * 1_000_000)
    count = 200
    client.send_raw(pack([b"GET", b"big"]) * count + pack([b"SET", b"done", b"1"]))
    assert other.ask("EXISTS", "done") == 0, "200 MB of replies must not pile up in memory"
    for _ in range(count):
        assert len(client.take()) == 1_000_000
    assert client.take() == b"OK"
    assert other.ask("EXISTS", "done") == 1


def test_quit_and_kill_close_after_the_last_reply(connect):
    client, victim = connect(), connect()
    name = victim.ask("CLIENT", "ID")
    assert client.ask("CLIENT", "KILL", "ID", name) == 1
    assert victim.rest() == b""
    client.send_raw(pack([b"PING"]) + pack([b"QUIT"]) + pack([b"SET", b"after", b"1"]))
    assert client.rest() == b"+PONG\r\n+OK\r\n"
    assert connect().ask("EXISTS", "after") == 0
