"""Sequences on streams in which order matters, sent to the engine and to a real Redis: waits and their ends,
notifications, WATCH.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stream_pair import StreamPair
from two_servers import Pair, Words

from millstream.testing import RedisProcess


@pytest.fixture(scope="module")
def redis(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    """A server of this module's own, because its settings are changed. Skipped if the shared server is skipped."""
    with RedisProcess() as server:
        yield server


def words(line: str) -> Words:
    return tuple(b"" if word == "''" else word.encode() for word in line.split())


GROUP = ["0 XGROUP CREATE s g $ MKSTREAM"]
READ = "XREADGROUP GROUP g c BLOCK 0 STREAMS s >"

WAITS: dict[str, list[str]] = {
    "a reader gets what is added": ["1 XREAD BLOCK 0 STREAMS s $", "0 XADD s 1-1 f v", "1 XREAD BLOCK 0 STREAMS s 0"],
    "readers are served in order of arrival": [
        *GROUP,
        f"2 {READ}",
        f"1 {READ}",
        "0 XADD s 1-1 f v",
        "0 XADD s 2-1 f v",
        "0 XPENDING s g - + 10",
    ],
    "one addition serves every plain reader": [
        "1 XREAD BLOCK 0 STREAMS s $",
        "2 XREAD COUNT 1 BLOCK 0 STREAMS t s 5 0",
        "0 XADD s 1-1 f v",
    ],
    "a reader that waits for later ids goes on waiting": ["1 XREAD BLOCK 0 STREAMS s 5", "0 XADD s 1-1 f v"],
    "the group goes": [*GROUP, f"1 {READ}", "0 XGROUP DESTROY s g"],
    "another group goes": [*GROUP, "0 XGROUP CREATE s h $", f"1 {READ}", "0 XGROUP DESTROY s h"],
    "the key goes": [*GROUP, f"1 {READ}", "2 XREAD BLOCK 0 STREAMS s $", "0 DEL s", "0 XADD s 1-1 f v"],
    "the key is unlinked": [*GROUP, f"1 {READ}", "0 UNLINK s"],
    "the key is replaced by another kind": [*GROUP, f"1 {READ}", "2 XREAD BLOCK 0 STREAMS s $", "0 SET s x", "0 DEL s"],
    "the key is renamed away": [*GROUP, f"1 {READ}", "0 RENAME s t", "0 XADD t 1-1 f v"],
    "another stream takes the key": [*GROUP, f"1 {READ}", "0 XADD t 5-1 f v", "0 RENAME t s"],
    "another stream with the group takes the key": [
        *GROUP,
        "0 XADD t 5-1 f v",
        "0 XGROUP CREATE t g 0",
        f"1 {READ}",
        "0 RENAME t s",
    ],
    "a plain reader meets a stream that was renamed": [
        "1 XREAD BLOCK 0 STREAMS s 0",
        "0 XADD t 5-1 f v",
        "0 RENAME t s",
    ],
    "everything goes": [*GROUP, f"1 {READ}", "2 XREAD BLOCK 0 STREAMS s $", "0 FLUSHALL"],
    "the database goes": [*GROUP, f"1 {READ}", "0 FLUSHDB"],
    "a group that is set back does not wake its readers": [
        "0 XADD s 1-1 f v",
        *GROUP,
        f"1 {READ}",
        "0 XGROUP SETID s g 0",
        "0 XADD s 2-1 f v",
    ],
    "what is added and deleted in one go": [
        *GROUP,
        f"1 {READ}",
        "2 XREAD BLOCK 0 STREAMS s $",
        *("0 MULTI", "0 XADD s 1-1 f v", "0 XDEL s 1-1", "0 EXEC"),
        "0 XINFO GROUPS s",
    ],
    "a key that is deleted and recreated in one transaction": [
        *GROUP,
        f"1 {READ}",
        *("0 MULTI", "0 DEL s", "0 XGROUP CREATE s g 0 MKSTREAM", "0 XADD s 1-1 f v", "0 EXEC"),
    ],
    "what is deleted and made without its group in one go": [
        *GROUP,
        f"1 {READ}",
        *("0 MULTI", "0 DEL s", "0 XADD s 1-1 f v", "0 EXEC"),
    ],
    "no wait inside a transaction": [*GROUP, "0 MULTI", "0 XREAD BLOCK 0 STREAMS s $", f"0 {READ}", "0 EXEC"],
    "a consumer that waits is made when it is served": [
        *GROUP,
        f"1 {READ}",
        "0 XINFO CONSUMERS s g",
        "0 XADD s 1-1 f v",
        "0 XINFO CONSUMERS s g",
    ],
    "waiting without acknowledgement": [
        *GROUP,
        "1 XREADGROUP GROUP g c NOACK BLOCK 0 STREAMS s >",
        "0 XADD s 1-1 f v",
        "0 XPENDING s g",
        "0 XINFO GROUPS s",
    ],
    "history does not wait": [*GROUP, "1 XREADGROUP GROUP g c BLOCK 0 STREAMS s 0", "1 PING"],
    "one of two streams": [
        *GROUP,
        "0 XGROUP CREATE t g $ MKSTREAM",
        "1 XREADGROUP GROUP g c BLOCK 0 STREAMS s t > >",
        "0 XADD t 1-1 f v",
        "0 XADD s 1-1 f v",
    ],
    "only so many after a wait": [
        "1 XREAD COUNT 2 BLOCK 0 STREAMS s 0",
        *("0 MULTI", "0 XADD s 1-1 f v", "0 XADD s 2-1 f v", "0 XADD s 3-1 f v", "0 EXEC"),
    ],
}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", WAITS)
def test_waiting(redis: RedisProcess, protocol: int, name: str) -> None:
    with StreamPair(redis.port, connections=3, protocol=protocol) as pair:
        for line in WAITS[name]:
            pair.step(int(line[0]), words(line[2:]))
        pair.end_waits()
        for key in ("s", "t"):
            pair.step(0, words(f"XINFO STREAM {key} FULL"))


CHANGES = [
    "XADD s 1-1 f v",
    "XADD s MAXLEN 1 2-1 f v",
    "XADD s MAXLEN ~ 5 3-1 f v",
    "XADD s 4-1 f v",
    "XDEL s 9-9",
    "XDEL s 3-1",
    "XGROUP CREATE s g 0",
    "XGROUP CREATE s g 0",
    "XGROUP CREATE t g 0 MKSTREAM",
    "XGROUP CREATECONSUMER s g alice",
    "XGROUP CREATECONSUMER s g alice",
    "XREADGROUP GROUP g bob COUNT 1 STREAMS s >",
    "XREADGROUP GROUP g bob STREAMS s 0",
    "XREADGROUP GROUP g bob NOACK STREAMS s >",
    "XREADGROUP GROUP g dave STREAMS s >",
    "XCLAIM s g alice 0 2-1",
    "XCLAIM s g erin 0 4-1 FORCE JUSTID LASTID 9-9",
    "XAUTOCLAIM s g frank 0 0",
    "XACK s g 2-1",
    "XACK s g 2-1",
    "XGROUP SETID s g 0",
    "XGROUP DELCONSUMER s g absent",
    "XGROUP DELCONSUMER s g frank",
    "XGROUP DESTROY s none",
    "XGROUP DESTROY s g",
    "XSETID s 20-1",
    "XTRIM s MAXLEN 10",
    "XTRIM s MAXLEN 0",
    "XLEN none",
    "XRANGE none - +",
    "XREAD STREAMS none 0",
    "XINFO STREAM none",
    "XPENDING none g",
    "XACK none g 1-1",
]


@pytest.mark.parametrize("protocol", [2, 3])
def test_notifications(redis: RedisProcess, protocol: int) -> None:
    with Pair(redis.port, connections=2, protocol=protocol) as pair:
        pair.step(0, (b"CONFIG", b"SET", b"notify-keyspace-events", b"KEAnm"))
        pair.step(1, (b"PSUBSCRIBE", b"__key*__:*"))
        for line in CHANGES:
            pair.step(0, words(line))
        pair.step(0, (b"PUBLISH", b"__key__:end", b"of it"))
        pair.step(1, (b"PING", b"the end"))


def test_changes_that_abort_a_watching_transaction(redis: RedisProcess) -> None:
    """After each change: does a transaction that watched the key fail?"""
    with StreamPair(redis.port, connections=2, protocol=2) as pair:
        for line in CHANGES:
            pair.step(1, (b"WATCH", b"s", b"t"))
            pair.step(0, words(line))
            for step in ("MULTI", f"ECHO after:{line.replace(' ', ':')}", "EXEC"):
                pair.step(1, words(step))
