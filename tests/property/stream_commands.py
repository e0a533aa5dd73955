"""Stream commands as hypothesis strategies: mostly valid, and invalid in the ways for which Redis has errors.

No id comes from a clock, and idle times are far below or far above every threshold in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from two_servers import OperationFunction, Words

SPEAKERS = 3

# Hypothesis picks evenly. Values that are listed several times make commands hit the same keys more often.
KEYS = st.sampled_from([b"s"] * 12 + [b"t"] * 2 + [b"u"])
GROUPS = st.sampled_from([b"g"] * 12 + [b"h"] * 2 + [b"none", b""])
CONSUMERS = st.sampled_from([b"alice"] * 4 + [b"bob"] * 4 + [b"Carol", b"", b"al"])
NAMES = st.sampled_from([b"f", b"f", b"f", b"g", b"longer-name", b"", b"12", b"-5"])
VALUES = st.sampled_from(
    [
        *(b"", b"v", b"7", b"127", b"128", b"-1", b"-4096", b"4095", b"4096", b"32768", b"8388607", b"8388608", b"-0"),
        *(b"2147483648", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"007", b"+1"),
        *(b"x" * 19, b"x" * 62, b"x" * 63, b"x" * 64, b"x" * 85, b"x" * 125, b"x" * 126, b"y" * 300, b"z" * 4095),
        *(b"z" * 4096, b"z" * 17000, b"\x00\xff\r\n"),
    ]
)
PLAIN_IDS = st.builds(lambda ms, seq: b"%d-%d" % (ms, seq), st.integers(0, 14), st.sampled_from([0] * 8 + [1, 2]))
NEXT = st.just(b"@")
"""A placeholder for an id that is greater than all earlier ones."""
ODD_IDS = st.sampled_from(
    [
        *(b"5", b"0", b"7", b"5-*", b"7-*", b"0-*", b"0-0", b"0-1", b"300", b"90-1", b"18446744073709551615-0"),
        *(b"18446744073709551615-18446744073709551614", b"18446744073709551615-18446744073709551615"),
        *(b"5-18446744073709551615", b"18446744073709551615", b"9223372036854775808-9223372036854775807"),
        *(b"18446744073709551616-1", b"1-18446744073709551616", b"x", b"1-x", b"-", b"+", b"*", b"$", b">", b"", b"1-"),
        *(b"-1", b"1--1", b"1-1-1", b"*-1", b"*-*", b"1-**", b" 1-1", b"1- 1", b"1- -1", b"+3-+4", b"03-004", b"3-4 "),
        *(b"3\x00-4", b"3-4\x00x", b"1" * 200, b"(", b"(1", b"(1-1", b"((1", b"(-", b"(+", b"(0-0", b"(5", b"(1-*"),
        b"(18446744073709551615-18446744073709551615",
    ]
)
IDS = st.one_of(*[PLAIN_IDS] * 8, ODD_IDS)
NEW_IDS = st.one_of(*[NEXT] * 6, st.just(b"@*"), st.just(b"@*"), IDS.filter(lambda item: item != b"*"))
STARTS = st.one_of(st.sampled_from([b"-", b"0", b"-", b"0-0", b"("]), IDS, IDS.map(lambda item: b"(" + item))
ENDS = st.one_of(st.sampled_from([b"+", b"+", b"9", b"("]), IDS, IDS.map(lambda item: b"(" + item))
NUMBERS = st.sampled_from([b"0", b"1", b"2", b"3", b"5", b"10", b"50", b"-1", b"x", b"", b"9223372036854775808", b"01"])
COUNTS = st.sampled_from([b"1", b"2", b"3", b"5", b"50"] * 2 + [b"0", b"-1", b"x", b"9223372036854775807"])
IDLES = st.sampled_from([b"0"] * 6 + [b"1000000"] * 2 + [b"-5", b"x"])
"""Minimum idle times of claims: 0, or more than the idle time of any entry that was not set explicitly."""
FAR_PAST = st.sampled_from([b"5000000", b"5000000", b"0", b"-1", b"x", b"9223372036854775807"])
READS = st.sampled_from([b"0", b"1", b"3", b"100", b"-1", b"-2", b"x"])


def words_of(line: str) -> Words:
    """The arguments of a line as a user would type it; '' is an empty one."""
    return tuple(b"" if word == "''" else word.encode() for word in line.split())


def words(*parts: Any) -> st.SearchStrategy[Words]:
    """Each part is a word, a strategy for a word, or a strategy for several words (a tuple)."""

    def flatten(values: tuple[Any, ...]) -> Words:
        flat: list[bytes] = []
        for value in values:
            flat += [value] if isinstance(value, bytes) else value
        return tuple(flat)

    return st.tuples(*(st.just(part) if isinstance(part, bytes) else part for part in parts)).map(flatten)


def maybe(*parts: Any, often: bool = False) -> st.SearchStrategy[Words]:
    values = words(*parts)
    return st.one_of(values, st.just(())) if often else st.one_of(st.just(()), st.just(()), values)


def several(first: Any, least: int = 1, limit: int = 4) -> st.SearchStrategy[Words]:
    return st.lists(first, min_size=least, max_size=limit).map(tuple)


FIELDS = st.one_of(
    words(b"f", VALUES),
    words(b"f", VALUES),
    words(b"f", VALUES, b"g", VALUES),
    st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=4).map(lambda pairs: tuple(w for p in pairs for w in p)),
    several(VALUES, 1, 3),
)
TRIM = st.one_of(
    words(b"MAXLEN", NUMBERS),
    words(b"MAXLEN", b"=", NUMBERS),
    words(b"maxlen", b"~", NUMBERS),
    words(b"MAXLEN", b"~", NUMBERS, b"LIMIT", NUMBERS),
    words(b"MINID", IDS),
    words(b"MINID", b"=", IDS),
    words(b"minid", b"~", IDS),
    words(b"MINID", b"~", IDS, b"LIMIT", NUMBERS),
    words(b"MAXLEN", NUMBERS, b"LIMIT", NUMBERS),
    words(b"LIMIT", NUMBERS),
    words(b"MAXLEN", b"1", b"MINID", b"1"),
    words(b"MAXLEN"),
    words(b"MAXLEN", b"~"),
    words(b"nonsense"),
)
CLAIM_OPTIONS = several(
    st.one_of(
        words(b"JUSTID"),
        words(b"justid"),
        words(b"FORCE"),
        words(b"IDLE", FAR_PAST),
        words(b"TIME", FAR_PAST),
        words(b"RETRYCOUNT", READS),
        words(b"LASTID", IDS),
        words(b"nonsense"),
        words(b"IDLE"),
    ),
    0,
    3,
).map(lambda parts: tuple(word for part in parts for word in part))
READ_OPTIONS = several(
    st.one_of(
        words(b"COUNT", COUNTS),
        words(b"COUNT", COUNTS),
        words(b"NOACK"),
        words(b"BLOCK", st.sampled_from([b"x", b"-1"])),
        words(b"nonsense"),
    ),
    0,
    2,
).map(lambda parts: tuple(word for part in parts for word in part))
GROUP = words(b"GROUP", GROUPS, CONSUMERS)
READ_IDS = st.one_of(PLAIN_IDS, st.sampled_from([b"0", b"$", b">"]), ODD_IDS)
GROUP_IDS = st.one_of(*[st.sampled_from([b">", b">", b">", b"0", b"0-0"])] * 3, IDS)


def streams(ids: st.SearchStrategy[bytes]) -> st.SearchStrategy[Words]:
    def flatten(pairs: list[tuple[bytes, bytes]]) -> Words:
        return (b"STREAMS", *(key for key, _ in pairs), *(pair for _, pair in pairs))

    map = st.tuples(KEYS, ids).map(lambda pair: (b"STREAMS", *pair))
    return st.one_of(
        *[map] * 4,
        st.lists(st.tuples(KEYS, ids), min_size=1, max_size=3).map(flatten),
        several(KEYS, 0, 3).map(lambda keys: (b"streams", *keys)),
    )


WRITING = st.one_of(
    words(b"XADD", KEYS, NEW_IDS, FIELDS),
    words(b"XADD", KEYS, NEW_IDS, FIELDS),
    words(b"xadd", KEYS, maybe(b"NOMKSTREAM"), maybe(TRIM, often=True), NEW_IDS, FIELDS),
    words(b"XDEL", KEYS, several(IDS)),
    words(b"XDEL", KEYS, several(PLAIN_IDS, 1, 8)),
    words(b"XTRIM", KEYS, TRIM),
    words(b"XTRIM", KEYS, TRIM, maybe(TRIM)),
    words(
        *(b"XSETID", KEYS, st.one_of(NEXT, IDS), maybe(b"ENTRIESADDED", NUMBERS)),
        *(maybe(b"MAXDELETEDID", IDS), maybe(st.sampled_from([b"nonsense", b"ENTRIESADDED", b"MAXDELETEDID"]))),
    ),
)
BULK = st.builds(
    lambda key, ids, fields: tuple((b"XADD", key, ids, *fields) for _ in range(len(fields) * 3)),
    KEYS,
    st.sampled_from([b"@", b"@*", b"@@"]),
    words(st.sampled_from([b"f", b"event"]), VALUES, maybe(b"g", VALUES)),
)
READING = st.one_of(
    words(b"XLEN", KEYS),
    words(b"XRANGE", KEYS, STARTS, ENDS, maybe(b"COUNT", COUNTS, often=True)),
    words(b"XRANGE", KEYS, STARTS, ENDS, maybe(b"COUNT", COUNTS), maybe(several(COUNTS))),
    words(b"XREVRANGE", KEYS, ENDS, STARTS, maybe(b"count", COUNTS, often=True)),
    words(b"XREAD", READ_OPTIONS, streams(READ_IDS)),
    words(b"XREAD", maybe(GROUP), streams(READ_IDS)),
)
GROUPING = st.one_of(
    words(b"XGROUP", b"CREATE", KEYS, GROUPS, st.one_of(st.sampled_from([b"0", b"$"]), IDS), maybe(b"MKSTREAM")),
    words(
        *(b"XGROUP", b"CREATE", KEYS, GROUPS, IDS, maybe(b"mkstream", often=True), maybe(b"ENTRIESREAD", READS)),
        maybe(st.sampled_from([b"nonsense", b"ENTRIESREAD"])),
    ),
    words(b"XGROUP", b"SETID", KEYS, GROUPS, st.one_of(st.just(b"$"), IDS), maybe(b"ENTRIESREAD", READS, often=True)),
    words(b"XGROUP", b"SETID", KEYS, GROUPS, IDS, maybe(b"MKSTREAM")),
    words(b"XGROUP", b"DESTROY", KEYS, GROUPS),
    words(b"XGROUP", b"CREATECONSUMER", KEYS, GROUPS, CONSUMERS),
    words(b"XGROUP", b"DELCONSUMER", KEYS, GROUPS, CONSUMERS),
    words(b"XGROUP", st.sampled_from([b"HELP", b"nonsense", b"CREATE", b"setid"]), several(KEYS, 0, 2)),
)
DELIVERY = st.one_of(
    words(b"XREADGROUP", GROUP, READ_OPTIONS, streams(GROUP_IDS)),
    words(b"XREADGROUP", GROUP, b"COUNT", st.sampled_from([b"1", b"2", b"5"]), b"STREAMS", KEYS, b">"),
    words(b"XREADGROUP", GROUP, b"STREAMS", KEYS, GROUP_IDS),
    words(b"XREADGROUP", maybe(b"GROUP", GROUPS), READ_OPTIONS, streams(GROUP_IDS)),
    words(b"XACK", KEYS, GROUPS, several(IDS)),
    words(b"XACK", KEYS, GROUPS, several(PLAIN_IDS, 1, 8)),
)
CLAIMING = st.one_of(
    words(b"XPENDING", KEYS, GROUPS),
    words(b"XPENDING", KEYS, GROUPS, maybe(b"IDLE", IDLES), STARTS, ENDS, COUNTS, maybe(CONSUMERS)),
    words(b"XPENDING", KEYS, GROUPS, several(IDS, 0, 6)),
    words(b"XCLAIM", KEYS, GROUPS, CONSUMERS, IDLES, several(PLAIN_IDS, 1, 6), CLAIM_OPTIONS),
    words(b"XCLAIM", KEYS, GROUPS, CONSUMERS, IDLES, several(IDS, 0, 3), CLAIM_OPTIONS),
    words(b"XAUTOCLAIM", KEYS, GROUPS, CONSUMERS, IDLES, STARTS, maybe(b"COUNT", COUNTS), maybe(b"JUSTID")),
    words(b"XAUTOCLAIM", KEYS, GROUPS, CONSUMERS, IDLES, b"0", maybe(several(st.sampled_from([b"COUNT", b"JUSTID"])))),
)
TELLING = st.one_of(
    words(b"XINFO", b"STREAM", KEYS),
    words(b"XINFO", b"STREAM", KEYS, b"FULL", maybe(b"COUNT", COUNTS)),
    words(b"XINFO", b"STREAM", KEYS, several(st.sampled_from([b"FULL", b"COUNT", b"1", b"nonsense"]))),
    words(b"XINFO", b"GROUPS", KEYS),
    words(b"XINFO", b"CONSUMERS", KEYS, GROUPS),
    words(b"XINFO", st.sampled_from([b"HELP", b"nonsense"])),
)
AROUND = st.one_of(
    words(b"SET", KEYS, b"a string"),
    words(b"DEL", KEYS),
    words(b"DEL", KEYS),
    words(b"TYPE", KEYS),
    words(b"RENAME", KEYS, KEYS),
    words(b"CONFIG", b"SET", b"stream-node-max-entries", st.sampled_from([b"1", b"2", b"3", b"10", b"0", b"200"])),
    words(b"CONFIG", b"SET", b"stream-node-max-bytes", st.sampled_from([b"0", b"1000", b"2000", b"4096"])),
)
ENDS_OF_WAITS = st.one_of(words(b"XGROUP", b"DESTROY", b"s", b"g"), words(b"DEL", b"s"), words(b"SET", b"s", b"x"))
ONE = st.one_of(WRITING, WRITING, READING, GROUPING, DELIVERY, DELIVERY, CLAIMING, TELLING, AROUND).map(lambda w: (w,))
WAITING = st.one_of(
    ENDS_OF_WAITS,
    words(b"XREADGROUP", b"GROUP", b"g", CONSUMERS, b"BLOCK", b"0", b"STREAMS", b"s", b">"),
    words(b"XREAD", maybe(b"COUNT", b"1"), b"BLOCK", b"0", b"STREAMS", KEYS, st.sampled_from([b"$", b"0", b"5"])),
    words(b"XREAD", b"BLOCK", b"0", streams(READ_IDS)),
    words(b"XREADGROUP", GROUP, maybe(b"NOACK"), maybe(b"COUNT", b"1"), b"BLOCK", b"0", b"STREAMS", KEYS, b">"),
    words(b"XREADGROUP", GROUP, b"BLOCK", b"0", streams(GROUP_IDS)),
).map(lambda w: (w,))
IN_ONE_GO = st.lists(
    st.one_of(WRITING, AROUND, GROUPING, DELIVERY, words(b"XREAD", b"BLOCK", b"0", streams(READ_IDS))), max_size=4
).map(lambda inner: ((b"MULTI",), *inner, (b"EXEC",)))


def _numbered(parts: list[tuple[int, tuple[Words, ...]]]) -> list[OperationFunction]:
    """Puts rising ids where a placeholder stands."""
    steps: list[OperationFunction] = []
    rising = 0
    for speaker, group in parts:
        for item in group:
            flat = list(item)
            for at, word in enumerate(flat):
                if word in (b"@", b"@*", b"@@"):
                    rising += word != b"@@" or rising % 7 == 0
                    flat[at] = b"%d-%s" % (rising, b"0" if word == b"@" else b"*")
            steps.append((speaker, tuple(flat)))
    return steps


def _begun(count: int, group: bytes, consumers: list[bytes]) -> tuple[Words, ...]:
    """Some entries, a group, and what its consumers have read."""
    return (
        *((b"XADD", b"s", b"@", b"f", b"v%d" % number) for number in range(count)),
        (b"XGROUP", b"CREATE", b"s", b"g", group, b"MKSTREAM"),
        *((b"XREADGROUP", b"GROUP", b"g", consumer, b"COUNT", b"3", b"STREAMS", b"s", b">") for consumer in consumers),
    )


BEGINNING = st.one_of(
    *[st.builds(_begun, st.integers(0, 9), st.sampled_from([b"0", b"$", b"2"]), several(CONSUMERS, 0, 3))] * 4,
    st.just(()),
).map(lambda steps: [(0, steps)])


def sequences(*steps: st.SearchStrategy[Any], speakers: int) -> st.SearchStrategy[list[OperationFunction]]:
    remaining = st.lists(st.tuples(st.integers(0, speakers - 1), st.one_of(*steps)), min_size=5, max_size=40)
    return st.tuples(BEGINNING, remaining).map(lambda parts: _numbered(parts[0] + parts[1]))


STEPS = sequences(ONE, ONE, ONE, ONE, BULK, speakers=1)
STEPS_WITH_WAITS = sequences(ONE, ONE, WAITING, WAITING, IN_ONE_GO, speakers=SPEAKERS)


def ending() -> Iterator[OperationFunction]:
    """Reads all values."""
    for key in (b"s", b"t", b"u"):
        yield 0, (b"TYPE", key)
        yield 0, (b"XLEN", key)
        yield 0, (b"XINFO", b"STREAM", key)
        yield 0, (b"XINFO", b"STREAM", key, b"FULL", b"COUNT", b"0")
        yield 0, (b"XTRIM", key, b"MAXLEN", b"~", b"3")
        yield 0, (b"XINFO", b"STREAM", key)
        yield 0, (b"XINFO", b"GROUPS", key)
