"""Requests of clients: complete, in pieces, inline, and malformed."""

import random

import pytest

from millstream.wire.requests import LINE_LIMIT, UNAUTHENTICATED, RequestLimits, RequestParser, split_inline_args
from millstream.wire.resp import pack

REQUESTS = [[b"PING"], [b"SET", b"k", b"\r\n$3\r\n*1\r\n"], [b"XADD", b"s", b"*", b"f", b"\0" * 300], [b"ECHO", b""]]
STREAM = b"".join(pack(words) for words in REQUESTS)


def fed(*pieces, limits=None):
    parser = RequestParser(limits or RequestLimits())
    return [words for piece in pieces for words in parser.feed(piece)], parser.fault


def test_requests_are_parsed_from_any_split():
    assert fed(STREAM * 3) == (REQUESTS * 3, None)
    assert fed(*[bytes([byte]) for byte in STREAM]) == (REQUESTS, None)
    for cut in range(len(STREAM)):
        assert fed(STREAM[:cut], STREAM[cut:] + STREAM) == (REQUESTS * 2, None)


def test_requests_and_inline_commands_may_be_mixed():
    assert fed(b"PING\r\n" + STREAM + b"\r\n  \nSET a 'b c'\nGET a\r\n") == (
        [[b"PING"], *REQUESTS, [b"SET", b"a", b"b c"], [b"GET", b"a"]],
        None,
    )


def test_empty_arrays_are_skipped_as_redis_does():
    assert fed(b"*0\r\n*-1\r\n" + STREAM + b"*0\r\n") == (REQUESTS, None)
    assert fed(b"*0\r\n" + STREAM) == (REQUESTS, None)
    assert fed(b"*0\r\n") == ([], None)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"*2\r\n+OK\r\n$1\r\nx\r\n", "expected '$', got '+'"),
        (b"*1\r\n:5\r\n", "expected '$', got ':'"),
        (b"*1\r\n*1\r\n$4\r\nPING\r\n", "expected '$', got '*'"),
        (b"*1\r\n=8\r\ntxt:PING\r\n", "expected '$', got '='"),
        (b"*x\r\n", "invalid multibulk length"),
        (b"*\r\n", "invalid multibulk length"),
        (b"*01\r\n$4\r\nPING\r\n", "invalid multibulk length"),
        (b"*1048577\r\n", "invalid multibulk length"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*4294967295\r\n", "invalid multibulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$x\r\n", "invalid bulk length"),
        (b"*1\r\n$536870913\r\n", "invalid bulk length"),
        (b"*1\r\n$4\r\nPINGxx", "expected CRLF after a bulk string"),
        (b"SET 'a\r\n", "unbalanced quotes in request"),
        (b"x" * (LINE_LIMIT + 1), "too big inline request"),
        (b"*" + b"1" * (LINE_LIMIT + 1), "too big mbulk count string"),
        (b"*1\r\n$" + b"1" * (LINE_LIMIT + 1), "too big bulk count string"),
    ],
)
def test_protocol_errors_match_redis_and_keep_earlier_requests(raw, text):
    requests, fault = fed(STREAM + raw + STREAM)
    assert requests == REQUESTS
    assert fault.text == f"ERR Protocol error: {text}"
    for piece in (1, 7):
        requests, fault = fed(*[(STREAM + raw)[at : at + piece] for at in range(0, len(STREAM + raw), piece)])
        assert (requests, fault.text) == (REQUESTS, f"ERR Protocol error: {text}")


def test_parser_accepts_nothing_after_a_fault():
    parser = RequestParser(RequestLimits())
    assert parser.feed(b"*1\r\n:1\r\n") == []
    assert parser.feed(STREAM) == []


def test_before_authentication_the_limits_are_small():
    assert fed(pack([b"AUTH", b"x" * 16384]), limits=UNAUTHENTICATED)[0]
    assert fed(b"*11\r\n", limits=UNAUTHENTICATED)[1].text.endswith("unauthenticated multibulk length")
    assert fed(b"*1\r\n$16385\r\n", limits=UNAUTHENTICATED)[1].text.endswith("unauthenticated bulk length")


def test_request_may_raise_the_limits_of_the_next():
    parser = RequestParser(UNAUTHENTICATED)
    big = [b"SET", b"k", b"x" * 50_000]
    assert parser.feed(b"PING\r\n" + pack([b"AUTH", b"pw"]) + pack(big) * 2) == [[b"PING"]]
    assert parser.feed(b"") == [[b"AUTH", b"pw"]]
    assert parser.more
    parser.limits = RequestLimits()
    assert parser.feed(b"") == [big, big]
    assert not parser.more


def test_request_has_a_total_limit():
    limits = RequestLimits(request_bytes=100)
    assert fed(pack([b"SET", b"k", b"x" * 96]), b"*", limits=limits)[1] is None
    over = pack([b"SET", b"k", b"x" * 97])
    assert fed(over[:30], over[30:], limits=limits)[1].text == "ERR Protocol error: request over the limit of 100 bytes"


def test_random_bytes_never_raise():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    alphabet = [
        b"*",
        b"$",
        b"\r\n",
        b"1",
        b"3",
        b"-",
        b"a",
        b'"',
        b"'",
        b"\\",
        b"\0",
        b"\xff",
        b"+",
        b"PING",
        b" ",
        b"\n",
    ]
    for _ in range(5_000):
        parser = RequestParser(RequestLimits())
        for _ in range(3):
            parser.feed(b"".join(dice.choices(alphabet, k=dice.randrange(1, 12))))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"  set  key value ", [b"set", b"key", b"value"]),
        (b'set k "a b\\n\\x41\\"\\q"', [b"set", b"k", b'a b\nA"q']),
        (b"set k 'it\\'s \\n'", [b"set", b"k", b"it's \\n"]),
        (b'""', [b""]),
        (b'a"b c"', [b"ab c"]),
        (b'"a"b', None),
        (b'"a', None),
        (b"'a", None),
        (b"", []),
    ],
)
def test_inline_arguments(line, words):
    assert split_inline_args(line) == words
