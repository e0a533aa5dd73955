"""The scripts of the Spark package and their emulations on random streams."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from millstream import open_blocking_broker
from millstream.broker.embedded import Embedded
from millstream.broker.scripts.script import all_names, script
from millstream.wire.commands import NIL_ARRAY, Args, Batch, ErrorReply

SEEDS = range(int(os.environ.get("TRIALS", "10")))
Side = Callable[[Args], Any]
Together = Callable[[Sequence[Args]], list[Any]]


@pytest.fixture
def sides(redis_url: str) -> Iterator[tuple[Side, Side]]:
    broker = open_blocking_broker(redis_url)
    embedded = Embedded(housekeeping=False)
    session = embedded.session()
    for name in all_names():
        broker.transport.call_many(Batch([(b"SCRIPT", b"LOAD", script(name).source)]))
    yield (
        lambda words: broker.transport.call_many(Batch([words]))[0],
        lambda words: embedded.execute(session, words),
    )
    broker.close()
    embedded.close()


@pytest.fixture
def transactions(redis_url: str) -> Iterator[tuple[Together, Together]]:
    """Commands as one transaction."""
    with open_blocking_broker(redis_url) as broker:
        embedded = Embedded(housekeeping=False)
        session = embedded.session()
        yield (
            lambda commands: broker.transport.call_many(Batch(commands, atomic=True)),
            lambda commands: embedded.execute_many(session, commands, atomic=True),
        )
        embedded.close()


def plain(reply: Any) -> Any:
    if reply is NIL_ARRAY:
        return None
    if isinstance(reply, ErrorReply):
        return reply.text.split(" script: ", 1)[0]
    if isinstance(reply, list):
        return [plain(item) for item in reply]
    return bytes(reply) if isinstance(reply, bytes) else reply


@pytest.mark.parametrize("seed", SEEDS)
def test_advance_group(sides: tuple[Side, Side], seed: int) -> None:
    chance = random.Random(seed)

    def both(*words: bytes) -> Any:
        theirs, ours = (plain(side(words)) for side in sides)
        assert ours == theirs, (seed, words)
        return theirs

    for side in sides:
        side((b"FLUSHALL",))
    ms, positions = 0, {}
    for _ in range(60):
        step = chance.random()
        if step < 0.3:
            ms += chance.choice((1, 9, 10, 2**40))
            both(b"XADD", b"s", b"%d-%d" % (ms, chance.choice((0, 9, 10, 2**63))), b"n", b"1")
        elif step < 0.35:
            both(b"SET", b"other", b"x")
            both(b"EVALSHA", script("advance_group").sha, b"1", b"other", b"g", b"1-1", b"")
        elif step < 0.4:
            both(b"DEL", b"s")
            positions.clear()
        elif step < 0.45:
            both(b"XGROUP", b"CREATECONSUMER", b"s", b"h", b"worker")
        elif step < 0.5:
            both(b"XGROUP", b"DELCONSUMER", b"s", b"h", b"worker")
        else:
            group = chance.choice((b"g", b"h"))
            place = (chance.randrange(ms + 2), chance.choice((0, 9, 10, 2**63)))
            read = chance.choice((b"", b"%d" % chance.randrange(50)))
            moved = both(b"EVALSHA", script("advance_group").sha, b"1", b"s", group, b"%d-%d" % place, read)
            before = positions.get(group)
            if moved == 1:
                assert before is None or place >= before
                positions[group] = place
            elif moved == 0:
                assert before is not None
                assert place <= before
        both(b"XINFO", b"GROUPS", b"s")


@pytest.mark.parametrize("seed", SEEDS)
def test_append_once_at(sides: tuple[Side, Side], seed: int) -> None:
    chance = random.Random(seed)

    def both(*words: bytes) -> Any:
        theirs, ours = (plain(side(words)) for side in sides)
        assert ours == theirs, (seed, words)
        return theirs

    for side in sides:
        side((b"FLUSHALL",))
    keys = (b"s", b"{s}.once:w")
    ms, rows, version = 0, 0, 1
    for _ in range(60):
        if chance.random() < 0.05:
            both(b"DEL", b"s")
        if chance.random() < 0.02:
            both(b"SET", b"s", b"no stream")
        version += chance.choice((0, 0, 0, 0, 1, -1))
        version = max(version, 0)
        argv = [b"0", b"%d" % version, b"%d" % chance.choice((rows, rows, rows, 0, rows + 1))]
        argv += [chance.choice((b"-", b"aa")), chance.choice((b"-", b"aa", b"bb")), b"100000"]
        for _ in range(chance.randint(0, 4)):
            ms += chance.choice((0, 1, 1, 1, 2**40))
            fields = [b"a", b"1", b"b", b"2"][: chance.choice((2, 4))]
            argv += [b"%d" % len(fields), b"%d-%d" % (ms, chance.choice((0, 9, 10, 2**63))), *fields]
        before = both(b"XLEN", b"s")
        answer = both(b"EVALSHA", script("append_once_at").sha, b"2", *keys, *argv)
        if answer[0] == b"ROWS":
            rows = int(answer[1])
        elif answer[0] == b"OK":
            rows = int(both(b"HGET", keys[1], b"0").split(b" ")[1])
        if isinstance(before, int) and answer[0] != b"OK":
            assert both(b"XLEN", b"s") == before
        both(b"XRANGE", b"s", b"-", b"+")
        both(b"HGETALL", keys[1])


def shapes_of_ids(reply: Any) -> Any:
    """Generated ids are times, and differ; only their form must be equal."""
    if isinstance(reply, list):
        return [shapes_of_ids(item) for item in reply]
    if isinstance(reply, bytes) and re.fullmatch(rb"[1-9]\d{12}-\d+", reply):
        return b"ID"
    return re.sub(rb"[1-9]\d{12}-\d+$", b"ID", reply) if isinstance(reply, bytes) else reply


@pytest.mark.parametrize("seed", SEEDS)
def test_brackets_are_paired(transactions: tuple[Together, Together], seed: int) -> None:
    """The transaction with both scripts: equal replies and equal streams; a refused transaction changes nothing."""
    chance = random.Random(seed)

    def command_pipeline(*commands: Args) -> Any:
        theirs, ours = (shapes_of_ids(plain(side(commands))) for side in transactions)
        assert ours == theirs, (seed, commands)
        return theirs

    def both(*words: bytes) -> Any:
        return command_pipeline(words)[0]

    def state() -> Any:
        return [side((words,))[0] for side in transactions for words in look]

    both(b"FLUSHALL")
    keys = (b"s", b"{s}.once:w", b"{s}.once.gate")
    look = ((b"XINFO", b"STREAM", b"s", b"FULL", b"COUNT", b"0"), (b"HGETALL", keys[1]), (b"EXISTS", *keys))
    rows, version = 0, 1
    for _ in range(60):
        for likely, words in (
            (0.1, (b"DEL", b"s")),
            (0.02, (b"SET", b"s", b"no stream")),
            (0.03, (b"XADD", b"s", b"18446744073709551615-1", b"a", b"b")),
            (0.02, (b"SET", keys[1], b"no hash")),
            (0.1, (b"DEL", keys[1])),
            (0.02, (b"HSET", keys[1], b"0", b"no marker")),
            (0.05, (b"XTRIM", b"s", b"MAXLEN", b"2")),
            (0.1, (b"XGROUP", b"CREATE", b"s", b"g", b"0")),
            (0.05, (b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"2", b"STREAMS", b"s", b">")),
        ):
            if chance.random() < likely:
                both(*words)
        version = max(version + chance.choice((0, 0, 0, 0, 0, 0, 1, 1, -1)), 0)
        head = [b"0", b"%d" % version, b"%d" % chance.choice((rows, rows, rows, 0, rows + 1))]
        head += [chance.choice((b"-", b"aa")), chance.choice((b"-", b"aa", b"aa", b"bb")), b"100000"]
        appends: list[Args] = [(b"XADD", b"s", b"*", b"n", b"%d" % n) for n in range(chance.randint(1, 5))]
        broken = chance.random() < 0.2
        if broken:
            appends[chance.randrange(len(appends))] = (b"XADD", b"s", b"0-0", b"n", b"cannot be")
        argv = (*head, b"%d" % len(appends))
        before = state()
        answer = command_pipeline(
            script("once_open").eval_args(keys, argv),
            (b"XSETID", keys[2], b"18446744073709551615-18446744073709551615"),
            *appends,
            script("once_close").eval_args(keys, argv),
            (b"DEL", keys[2]),
        )
        assert both(b"EXISTS", keys[2]) == 0
        if answer[0] == [b"OK"] and not broken:
            assert answer[-2] == [b"OK", b"%d" % len(appends), b"ID"]
            rows = int(both(b"HGET", keys[1], b"0").split(b" ")[1])
            assert rows == int(head[2]) + len(appends)
        elif answer[0] == [b"OK"]:
            assert answer[-2].startswith("ERR not all rows of this transaction")
            assert [state()[n] for n in (1, 4)] == [before[n] for n in (1, 4)]  # the markers
        else:
            assert state() == before
            if answer[0][0] == b"ROWS":
                rows = int(answer[0][1])
        both(b"XRANGE", b"s", b"-", b"+")
        both(b"HGETALL", keys[1])
