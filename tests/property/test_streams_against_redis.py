"""Random stream commands, sent to the engine and to a real Redis: replies are equal byte by byte, except for times,
which are compared with tolerance.

``MILLSTREAM_FUZZ_EXAMPLES=20000`` runs longer. A failure prints its steps and how to replay them; so does
``--hypothesis-seed=N`` with the seed that pytest prints.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings
from stream_commands import SPEAKERS, STEPS, STEPS_WITH_WAITS, ending
from stream_pair import StreamPair, comparable
from stream_walk import Walk
from two_servers import OperationFunction, RealConnection, Words, decoded

from millstream.engine import Engine
from millstream.engine.stream.node import OpenNode
from millstream.testing import RedisProcess
from millstream.wire.resp import encode

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ_EXAMPLES", "500" if "TRIALS" in os.environ else "200"))
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def redis(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    """A server of this module's own, because its settings are changed. Skipped if the shared server is skipped."""
    with RedisProcess() as server:
        yield server


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.parametrize("protocol", [2, 3])
@PROFILE
@given(steps=STEPS)
def test_replies_equal_those_of_redis(redis: RedisProcess, protocol: int, steps: list[OperationFunction]) -> None:
    with StreamPair(redis.port, connections=1, protocol=protocol) as pair:
        for at, words in [*steps, *ending()]:
            note(f"{words!r}")
            pair.step(at, words)


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.parametrize("protocol", [2, 3])
@PROFILE
@given(steps=STEPS_WITH_WAITS)
def test_waits_equal_those_of_redis(redis: RedisProcess, protocol: int, steps: list[OperationFunction]) -> None:
    with StreamPair(redis.port, connections=SPEAKERS, protocol=protocol) as pair:
        for at, words in steps:
            note(f"connection {at}: {words!r}")
            pair.step(at, words)
        pair.end_waits()
        for at, words in ending():
            pair.step(at, words)


def walk(redis: RedisProcess, seed: int, *, protocol: int, speakers: int) -> None:
    with StreamPair(redis.port, connections=speakers, protocol=protocol) as pair:
        for number, (at, words) in enumerate(Walk(seed, speakers=speakers).steps(300)):
            try:
                pair.step(at, words)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
        try:
            pair.end_waits()
            for at, words in ending():
                pair.step(at, words)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, at the end: {error}") from error


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("speakers", [1, SPEAKERS])
def test_long_random_runs(redis: RedisProcess, protocol: int, speakers: int) -> None:
    """``MILLSTREAM_FUZZ_SEED=n`` replays the one walk that a failure names."""
    seeds = [int(os.environ["MILLSTREAM_FUZZ_SEED"])] if "MILLSTREAM_FUZZ_SEED" in os.environ else range(EXAMPLES // 20)
    for seed in seeds:
        walk(redis, seed, protocol=protocol, speakers=speakers)


# --- where nodes end ------------------------------------------------------------------------------------------------

SIZES = [[85], [1, 2, 3], [10, 20, 60, 64], [85, 86, 150], [200, 5000], [19, 20, 21], [63, 64, 125, 126], [4090, 17000]]
LIMITS = [("100", "4096"), ("100", "4096"), ("10", "2000"), ("0", "1000"), ("1", "0"), ("150", "100000"), ("1000", "0")]


def random_words(chance: random.Random, names: list[bytes], sizes: list[int]) -> Words:
    words: list[bytes] = []
    for name in names if chance.random() < 0.7 else [chance.choice(names)]:
        number = chance.choice([1, -1, 127, 128, 4096, -4097, 2**31, 2**63 - 1, 2**63, 10 ** chance.randrange(20)])
        words += [name, b"x" * chance.choice(sizes) if chance.random() < 0.8 else b"%d" % number]
    return tuple(words)


@pytest.mark.parametrize("seed", range(max(12, EXAMPLES // 20)))
def test_nodes_end_where_those_of_redis_end(redis: RedisProcess, seed: int) -> None:
    """Entries with ids by the clock, which take a short way in the engine; Redis gets the same ids."""
    chance = random.Random(seed)
    engine = Engine(now_ms=1)
    session, theirs = engine.session(), RealConnection(redis.port)
    theirs.ask(b"FLUSHALL")
    now_ms = chance.choice([1, 1000, 1_700_000_000_000])
    names = chance.choice([[b"event"], [b"f", b"g"], [b"event", b"other"], [b"1"]])
    sizes, jump, deletes = chance.choice(SIZES), chance.choice([0, 1, 200, 10**7, 2**33]), chance.choice([0, 0.02, 0.2])

    def both(*words: bytes) -> None:
        ours, real = engine.execute(session, words, now_ms), theirs.ask(*words)
        assert comparable(decoded(encode(ours))[0]) == comparable(real), words

    def limit() -> None:
        entries, size = chance.choice(LIMITS)
        both(b"CONFIG", b"SET", b"stream-node-max-entries", entries.encode())
        both(b"CONFIG", b"SET", b"stream-node-max-bytes", size.encode())

    limit()
    ids: list[bytes] = []
    for _ in range(300):
        now_ms += chance.choice([0, 0, 0, 0, 1, 1, jump, -5])
        now_ms = max(now_ms, 1)
        words = random_words(chance, names, sizes)
        ids.append(engine.execute(session, (b"XADD", b"s", b"*", *words), now_ms))
        assert theirs.ask(b"XADD", b"s", ids[-1], *words) == ids[-1]
        if chance.random() < deletes:
            both(b"XDEL", b"s", chance.choice(ids[-30:]), chance.choice(ids))
        if chance.random() < 0.02:
            both(b"XTRIM", b"s", b"MAXLEN", chance.choice([b"~", b"="]), b"%d" % chance.randrange(len(ids)))
        if chance.random() < 0.01:
            limit()
        both(b"XINFO", b"STREAM", b"s")
    both(b"XRANGE", b"s", b"-", b"+")
    theirs.close()


TEXT_LENGTHS = [0, 1, 19, 20, 21, 62, 63, 64, 124, 125, 126, 4094, 4095, 4096, 16377, 16378, 16379, 20000]
NUMBERS = [0, 127, 128, 4095, 4096, 32767, 32768, 8388607, 8388608, 2**31 - 1, 2**31, 2**63 - 1, 2**63]
VALUES = [
    *(b"x" * length for length in TEXT_LENGTHS),
    *(b"%d" % number for number in NUMBERS),
    *(
        b"%d" % -number
        for number in (1, 4096, 4097, 32768, 32769, 8388608, 8388609, 2**31, 2**31 + 1, 2**63, 2**63 + 1)
    ),
    *(b"-0", b"01", b"+1", b" 1", b"-", b"1.0"),
]
SECOND_IDS = ["5-1", "5-127", "5-128", "5-4097", "132-0", "133-0", "40000-0", "9000000-5", "9223372036854775900-0"]


@pytest.mark.parametrize(
    ("words", "second_id"),
    [((b"f", value), "5-1") for value in VALUES]
    + [((b"f", b"v"), second_id) for second_id in SECOND_IDS]
    + [((b"f", b"v", name, b"w"), "6-0") for name in VALUES[:6]],
)
def test_node_is_full_at_the_same_byte_as_in_redis(redis: RedisProcess, words: Words, second_id: str) -> None:
    """Two entries, and a third that fits exactly or is one byte too large: this shows the exact size of the first
    two."""
    node = OpenNode(5, 0, (b"f", b"v"))
    ms, seq = map(int, second_id.split("-"))
    node.add(ms, seq, words, sum(map(len, words)))
    third = (b"f", b"vv")
    size = node.redis_bytes() + 3
    theirs = RealConnection(redis.port)
    theirs.ask(b"CONFIG", b"SET", b"stream-node-max-entries", b"100")
    for limit, nodes in ((size, 2), (size + 1, 1)):
        theirs.ask(b"FLUSHALL")
        theirs.ask(b"CONFIG", b"SET", b"stream-node-max-bytes", b"0")
        assert theirs.ask(b"XADD", b"s", b"5-0", b"f", b"v") == b"5-0"
        assert theirs.ask(b"XADD", b"s", second_id.encode(), *words) == second_id.encode()
        theirs.ask(b"CONFIG", b"SET", b"stream-node-max-bytes", b"%d" % limit)
        theirs.ask(b"XADD", b"s", b"9223372036854775999-0", *third)
        assert theirs.ask(b"XINFO", b"STREAM", b"s")[3] == nodes
    theirs.close()
