"""DUMP and RESTORE of streams: literal bytes of real servers, and random streams copied to and from Redis."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from stream_pair import StreamPair
from stream_walk import Walk
from two_servers import RealConnection

from millstream.engine import Engine
from millstream.engine.stream.dump import crc64
from millstream.testing import RedisProcess
from millstream.wire.commands import OK, ErrorReply

NOW_MS = 1_794_789_200_000

# XADD s 1-1 name first; XADD s 1-2 name -5; XADD s 5-0 other xxx... n 70000; XDEL s 1-2; XGROUP CREATE s 7 0;
# XREADGROUP GROUP 7 alice COUNT 1 STREAMS s >; XCLAIM s 7 bob 0 5-0 TIME 1700000000000 RETRYCOUNT 3 FORCE JUSTID
REDIS_6_2_14 = bytes.fromhex(
    "0f011000000000000000010000000000000001c34050408707870000001800020140000a846e616d65050001020100200109856669727374"
    "06040103200c050101dffb020420080f0401dfff020201856f7468657206bc78e032000b3d816e02f2701101040801ff02050001c0070101"
    "0200000000000000010000000000000001ca9cc5e1a101000001000000000000000500000000000000000068e5cf8b010000030205616c69"
    "6365ca9cc5e1a1010000010000000000000001000000000000000103626f62cb9cc5e1a10100000100000000000000050000000000000000"
    "09007cfa49b967c0852a"
)
REDIS_7_0_15 = bytes.fromhex(
    "13011000000000000000010000000000000001c34050408707870000001800020140000a846e616d65050001020100200109856669727374"
    "06040103200c050101dffb020420080f0401dfff020201856f7468657206bc78e032000b3d816e02f2701101040801ff0205000101010203"
    "01c007010181ffffffffffffffff0200000000000000010000000000000001fe9cc5e1a10100000100000000000000050000000000000000"
    "0068e5cf8b010000030205616c696365fe9cc5e1a1010000010000000000000001000000000000000103626f62fe9cc5e1a1010000010000"
    "00000000000500000000000000000a004f5ae8af52435e1b"
)
REDIS_7_0_15_PLAIN = bytes.fromhex(
    "13011000000000000000010000000000000001"
    "1d1d0000000a000101000101018161020001020100010001816202040"
    "1ff010101010100000100"
    "0a006f4334ecd7fa5aec"
)
"""XADD s 1-1 a b; DUMP s, with rdbcompression no."""


@pytest.fixture(scope="module")
def redis(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    with RedisProcess() as server:
        yield server


@pytest.fixture
def real(redis: RedisProcess) -> Iterator[RealConnection]:
    connection = RealConnection(redis.port)
    connection.ask(b"FLUSHALL")
    connection.ask(b"CONFIG", b"SET", b"rdbcompression", b"no")
    yield connection
    connection.close()


class Asked:
    def __init__(self) -> None:
        self.engine = Engine(now_ms=NOW_MS, recording=True)
        self._session = self.engine.session()

    def ask(self, *words: bytes) -> Any:
        return self.engine.execute(self._session, words, NOW_MS)


def plain(reply: Any) -> Any:
    """Without the kinds that RESP2 does not have."""
    return [plain(item) for item in reply] if isinstance(reply, list) else reply


def test_checksum_equals_that_of_redis() -> None:
    assert crc64(b"123456789") == 0xE9C6D914C4B8D9CA


def test_dump_bytes_equal_those_of_redis() -> None:
    ours = Asked()
    ours.ask(b"XADD", b"s", b"1-1", b"a", b"b")
    assert ours.ask(b"DUMP", b"s") == REDIS_7_0_15_PLAIN


@pytest.mark.parametrize("payload", [REDIS_6_2_14, REDIS_7_0_15, REDIS_7_0_15_PLAIN], ids=["6.2", "7.0", "plain"])
def test_payloads_of_real_servers_are_restored_like_in_redis(payload: bytes, real: RealConnection) -> None:
    ours = Asked()
    assert ours.ask(b"RESTORE", b"s", b"0", payload) == OK
    assert real.ask(b"RESTORE", b"s", b"0", payload) == b"OK"
    full = (b"XINFO", b"STREAM", b"s", b"FULL")
    assert plain(ours.ask(*full)) == plain(real.ask(*full))


@pytest.mark.parametrize("seed", range(25))
def test_random_streams_go_both_ways(redis: RedisProcess, seed: int) -> None:
    with StreamPair(redis.port, connections=1, protocol=2) as pair:
        for at, words in Walk(seed, speakers=1).steps(200):
            pair.step(at, words)
        pair.end_waits()
        for key in (b"s", b"t", b"u"):
            ours, theirs = pair.both(b"DUMP", key)
            if type(ours) is not bytes:
                continue
            for name, payload in ((b"copy", theirs), (b"own", ours)):
                assert pair.both(b"RESTORE", name, b"0", payload, b"REPLACE") == (b"OK", b"OK")
            for name in (b"copy", b"own", key):
                pair.step(0, (b"XINFO", b"STREAM", name, b"FULL", b"COUNT", b"0"))
                pair.step(0, (b"XTRIM", name, b"MAXLEN", b"~", b"3"))
                pair.step(0, (b"XRANGE", name, b"-", b"+"))


def test_damaged_payloads_are_refused_and_change_nothing() -> None:
    dice = random.Random(7)
    ours = Asked()
    for _ in range(3000):
        body = bytearray(dice.choice([REDIS_6_2_14, REDIS_7_0_15, REDIS_7_0_15_PLAIN])[:-8])
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(len(body) - 2)] = dice.choice(
                [0, 1, 0x3F, 0x7F, 0x80, 0x81, 0xC3, 0xFF, dice.randrange(256)]
            )
        if dice.random() < 0.3:
            del body[dice.randrange(1, len(body)) :]
            body += b"\x0a\x00"
        reply = ours.ask(b"RESTORE", b"s", b"0", bytes(body) + crc64(bytes(body)).to_bytes(8, "little"))
        if reply == OK:
            assert ours.ask(b"DEL", b"s") == 1
        else:
            assert isinstance(reply, ErrorReply)
            assert ours.ask(b"EXISTS", b"s") == 0
    assert ours.ask(b"RESTORE", b"s", b"0", REDIS_7_0_15[:-1] + b"?") == ErrorReply(
        "ERR DUMP payload version or checksum are wrong"
    )


LINES = """
SET a 1|COPY a b|GET b|COPY a b|COPY a b REPLACE|COPY a a|COPY a a DB 1|COPY a b DB 99|COPY a b DB x
COPY a b DB|COPY none c|COPY a c FOO|PEXPIRE a 100000|COPY a c DB 2 REPLACE|SELECT 2|GET c|PERSIST c|SELECT 0
RPUSH l 1 2|COPY l m|RPUSH m 3|LRANGE l 0 -1|HSET h a 1|COPY h i|HSET i b 2|HGETALL h|SADD set 1|COPY set t
SADD t 2|SMEMBERS set|ZADD z 1 a|COPY z y|ZADD y 2 b|ZCARD z|XADD s 1-1 a b|XGROUP CREATE s g 0
XREADGROUP GROUP g c STREAMS s >|COPY s r|XACK r g 1-1|XPENDING s g|XPENDING r g|XADD r 2-0 c d|XLEN s
RESTORE a 0 x|RESTORE n 0 x|RESTORE n -1 x|RESTORE n x x|RESTORE n 0 x FOO|RESTORE n 0 x IDLETIME
RESTORE n 0 x IDLETIME -1|RESTORE n 0 x FREQ 300|RESTORE n 0 x IDLETIME 1 FREQ 1|RESTORE n 0|DUMP none|COPY a
OBJECT ENCODING b
"""


def test_copies_and_invalid_arguments_get_the_reply_of_redis(redis: RedisProcess) -> None:
    with StreamPair(redis.port, connections=1, protocol=2) as pair:
        for line in LINES.replace("\n", "|").strip("|").split("|"):
            pair.step(0, tuple(line.encode().split()))


def test_restored_and_copied_streams_are_journaled_as_commands() -> None:
    ours, again = Asked(), Asked()
    ours.ask(b"RESTORE", b"s", b"60000", REDIS_7_0_15)
    ours.ask(b"COPY", b"s", b"t")
    for unit in ours.engine.take_units():
        for _, words in unit:
            again.ask(*words)
    for key in (b"s", b"t"):
        assert (
            plain(again.ask(b"XINFO", b"STREAM", key, b"FULL"))[:15]
            == plain(ours.ask(b"XINFO", b"STREAM", key, b"FULL"))[:15]
        )
        assert again.ask(b"PTTL", key) == 60_000
