"""Malformed bytes by the hundred thousand: no crash, and no effect on another connection."""

from __future__ import annotations

import os
import random
import socket

import pytest

from millstream.broker.embedded import Embedded
from millstream.server import Server
from millstream.wire.requests import UNAUTHENTICATED, RequestLimits, RequestParser
from millstream.wire.resp import pack
from support.resp_decoder import Decoder, MalformedReply

CASES = int(os.environ.get("CASES", "100000"))
PER_CONNECTION = 5

SPOKEN = """
SET GET XADD s * 1-1 XREAD BLOCK 0 STREAMS $ MULTI EXEC k HELLO 3 SUBSCRIBE XREADGROUP GROUP > -1 SELECT 15
CLIENT REPLY OFF XAUTOCLAIM ( + - COUNT LIMIT ~ = MAXLEN 99999999999999999999
"""
WORDS = [*SPOKEN.encode().split(), b"", b"\0", b"\r\n", b"\xff" * 5, b"a b"]
PIECES = [
    *(bytes([letter]) for letter in b"*$:+-%~>_#(=,!|013'\"\\ \r\n\0\xff"),
    *(b"\r\n", b"9" * 20, b"\\x", b"PING", b"*1\r\n$4\r\nPING\r\n"),
    *(b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"Host: x\r\n"),
]


def malformed(dice: random.Random) -> bytes:
    """A damaged request, random RESP control characters, or random bytes."""
    kind = dice.randrange(5)
    if kind == 0:
        return dice.randbytes(dice.randrange(1, 40))
    if kind == 1:
        return b"".join(dice.choices(PIECES, k=dice.randrange(1, 10)))
    raw = bytearray(pack(dice.choices(WORDS, k=dice.randrange(1, 7))))
    if kind == 2:
        for _ in range(dice.randrange(1, 4)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    elif kind == 3:
        del raw[dice.randrange(len(raw)) :]
    else:
        start = dice.randrange(len(raw))
        raw[start:start] = dice.choice(PIECES)
    return bytes(raw)


def test_parser_accepts_any_bytes_in_any_split():
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(CASES // 4):
        data = b"".join(malformed(dice) for _ in range(dice.randrange(1, 4)))
        for limits in (RequestLimits(), UNAUTHENTICATED):
            whole, pieces = RequestParser(limits), RequestParser(limits)
            requests = _all(whole, data)
            cut = dice.randrange(len(data) + 1)
            assert _all(pieces, data[:cut]) + _all(pieces, data[cut:]) == requests
            assert (whole.fault and whole.fault.text) == (pieces.fault and pieces.fault.text)
            assert all(type(word) is bytes for request in requests for word in request)


def _all(parser: RequestParser, data: bytes) -> list[list[bytes]]:
    requests = parser.feed(data)
    stored = list(requests)
    while requests and parser.more:
        requests = parser.feed(b"")
        stored += requests
    return stored


def _hear(sock: socket.socket) -> bytes:
    """The bytes that were received, without waiting for more."""
    heard = b""
    try:
        while data := sock.recv(1 << 16):
            heard += data
    except (BlockingIOError, ConnectionResetError):
        pass
    return heard


@pytest.mark.timeout(600)
@pytest.mark.parametrize("password", [None, b"secret"])
def test_no_crash_and_no_effect_on_another_connection(password):
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    embedded = Embedded(password=password)
    server = Server(embedded, port=0).start()
    bystander = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    decoder = Decoder()

    def ask(*words: bytes):
        bystander.sendall(pack(words))
        while (taken := decoder.take()) is None:
            data = bystander.recv(1 << 16)
            assert data, "the bystander was hung up on"
            decoder.feed(data)
        return taken[0]

    if password:
        assert ask(b"AUTH", password) == b"OK"
    assert ask(b"SELECT", b"9") == b"OK"
    assert ask(b"XADD", b"precious", b"1-1", b"f", b"v") == b"1-1"
    try:
        for number in range(CASES // 4 // PER_CONNECTION):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as attacker:
                attacker.setblocking(False)
                try:
                    for _ in range(PER_CONNECTION):
                        attacker.send(malformed(dice))
                except (ConnectionError, BlockingIOError):
                    pass
                heard = _hear(attacker)
            _must_be_replies(heard)
            assert ask(b"ECHO", b"%d" % number) == b"%d" % number
        assert ask(b"XRANGE", b"precious", b"-", b"+") == [[b"1-1", [b"f", b"v"]]]
    finally:
        server.stop()
        embedded.close()


def _must_be_replies(heard: bytes) -> None:
    decoder = Decoder()
    decoder.feed(heard)
    try:
        while decoder.take() is not None:
            pass
    except MalformedReply as error:
        pytest.fail(f"not a reply: {error} in {heard!r}")
