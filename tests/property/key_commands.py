"""Commands on keys as hypothesis strategies: mostly valid, and invalid in the ways for which Redis has errors."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from two_servers import OperationFunction, Words

SPEAKERS = 2

KEYS = st.sampled_from([b"a"] * 8 + [b"b"] * 3 + [b"c", b"{x}1", b""])
"""Few keys, one of them much more frequent than the others, so that most commands find a value."""
MEMBERS = st.sampled_from([b"m", b"n", b"o", b"1", b"2", b"-7", b"", b"\x00\xff\r\n", b"x" * 70])
INTEGERS = st.sampled_from(
    [
        *b"0 1 2 -1 10 -3 9223372036854775807 -9223372036854775808 9223372036854775808 01 +1 1.0 x -0 -".split(),
        b"",
        b" 1",
    ]
)
COUNTS = st.sampled_from([b"0", b"1", b"2", b"3", b"-1", b"-2", b"100", b"x"])
SCORES = st.sampled_from(
    [*b"0 1 1.5 -2 0.1 inf -inf +inf 1e3 3.0 nan x 0x10 1e400 1e-400 Infinity 1_0 .5 5.".split(), b"", b" 1"]
)
"""Without minus zero: Redis keeps its sign in large sorted sets and loses it in small ones; ours always loses it."""
BOUNDS = st.one_of(SCORES, SCORES.map(lambda score: b"(" + score))
LEX_BOUNDS = st.sampled_from([b"-", b"+", b"[m", b"(m", b"[n", b"(n", b"[", b"(", b"m", b"[x", b"(1", b"++"])
VALUES = st.one_of(MEMBERS, INTEGERS)
FAR = st.sampled_from([b"100000", b"200000", b"300000"])
FAR_MS = FAR.map(lambda seconds: seconds + b"000")
WRONG_TIMES = st.sampled_from([b"0", b"-1", b"x", b"9223372036854775807", b"9223372036854775", b""])
PATTERNS = st.sampled_from([b"*", b"?", b"[a-b]", b"[^a]", b"a*", b"\\a", b"*x*", b"[", b"[b-a]", b"", b"m*", b"{*}?"])


def words(*parts: Any) -> st.SearchStrategy[Words]:
    """Each part is a word, a strategy for a word, or a strategy for several words (a tuple)."""

    def flatten(values: tuple[Any, ...]) -> Words:
        flat: list[bytes] = []
        for value in values:
            flat += [value] if isinstance(value, bytes) else value
        return tuple(flat)

    return st.tuples(*(st.just(part) if isinstance(part, bytes) else part for part in parts)).map(flatten)


def some(first: st.SearchStrategy[Any], least: int = 0, most: int = 3) -> st.SearchStrategy[list[bytes]]:
    def flatten(values: list[Any]) -> list[bytes]:
        return [word for value in values for word in ([value] if isinstance(value, bytes) else value)]

    return st.lists(first, min_size=least, max_size=most).map(flatten)


def pick(*names: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from(names)


SET_OPTIONS = some(
    st.one_of(
        pick(b"NX", b"XX", b"GET", b"KEEPTTL", b"get", b"PERSIST"),
        words(b"EX", FAR),
        words(b"PX", FAR_MS),
        words(pick(b"EX", b"PX", b"EXAT", b"PXAT"), WRONG_TIMES),
        words(b"EXAT", b"99999999999"),
        words(b"PXAT", b"99999999999000"),
    )
)
GETEX_OPTIONS = some(
    st.one_of(
        pick(b"PERSIST", b"KEEPTTL"),
        words(b"EX", FAR),
        words(b"PX", FAR_MS),
        words(pick(b"EX", b"PX", b"EXAT", b"PXAT"), WRONG_TIMES),
        words(b"EXAT", pick(b"1", b"99999999999")),
    ),
    most=2,
)
EXPIRE_OPTIONS = some(pick(b"NX", b"XX", b"GT", b"LT", b"foo"), most=2)
SCAN_OPTIONS = some(
    st.one_of(words(b"MATCH", PATTERNS), words(b"COUNT", pick(b"1000", b"0", b"x")), pick(b"MATCH", b"FOO")), most=2
)
PAIRS = some(words(MEMBERS, VALUES), least=1)
SCORED = some(words(SCORES, MEMBERS), least=1)
RANGE_OPTIONS = some(
    st.one_of(
        pick(b"WITHSCORES", b"REV", b"BYSCORE", b"withscores", b"FOO"),
        words(b"LIMIT", pick(b"0", b"1", b"-1", b"x"), pick(b"0", b"1", b"-1", b"2")),
        pick(b"LIMIT"),
    )
)
EQUAL_SCORES = some(words(b"0", MEMBERS), least=1)

STRINGS = st.one_of(
    words(b"SET", KEYS, VALUES),
    words(b"SET", KEYS, VALUES, SET_OPTIONS),
    words(pick(b"GET", b"GETDEL", b"STRLEN", b"INCR", b"DECR"), KEYS),
    words(pick(b"INCRBY", b"DECRBY"), KEYS, INTEGERS),
    words(b"GETEX", KEYS, GETEX_OPTIONS),
    words(pick(b"SETNX", b"APPEND"), KEYS, VALUES),
    words(b"SETEX", KEYS, st.one_of(FAR, WRONG_TIMES), VALUES),
    words(b"PSETEX", KEYS, st.one_of(FAR_MS, WRONG_TIMES), VALUES),
    words(b"MGET", some(KEYS, least=1)),
    words(b"MSET", some(words(KEYS, VALUES), least=1)),
)
GENERIC = st.one_of(
    words(pick(b"DEL", b"UNLINK", b"EXISTS", b"TOUCH"), some(KEYS, least=1)),
    words(pick(b"TYPE", b"TTL", b"PTTL", b"EXPIRETIME", b"PEXPIRETIME", b"PERSIST"), KEYS),
    words(b"OBJECT", b"ENCODING", KEYS),
    words(b"EXPIRE", KEYS, st.one_of(FAR, WRONG_TIMES), EXPIRE_OPTIONS),
    words(b"PEXPIRE", KEYS, st.one_of(FAR_MS, WRONG_TIMES), EXPIRE_OPTIONS),
    words(b"EXPIREAT", KEYS, st.one_of(pick(b"99999999999", b"99999999998"), WRONG_TIMES), EXPIRE_OPTIONS),
    words(b"PEXPIREAT", KEYS, pick(b"99999999999000", b"1", b"-1", b"99999999999001"), EXPIRE_OPTIONS),
    words(pick(b"RENAME", b"RENAMENX"), KEYS, KEYS),
    words(b"KEYS", PATTERNS),
    words(b"SCAN", pick(b"0", b"x", b"-"), words(b"COUNT", b"1000"), SCAN_OPTIONS),
    words(b"SCAN", b"0", b"COUNT", b"1000", b"TYPE", pick(b"string", b"HASH", b"zset", b"foo")),
    words(b"DBSIZE"),
    words(pick(b"FLUSHDB", b"FLUSHALL"), some(pick(b"SYNC", b"ASYNC", b"x"), most=1)),
)
HASHES = st.one_of(
    words(pick(b"HSET", b"HMSET"), KEYS, PAIRS),
    words(b"HSETNX", KEYS, MEMBERS, VALUES),
    words(pick(b"HGET", b"HEXISTS"), KEYS, MEMBERS),
    words(pick(b"HMGET", b"HDEL"), KEYS, some(MEMBERS, least=1)),
    words(pick(b"HGETALL", b"HLEN", b"HKEYS", b"HVALS"), KEYS),
    words(b"HINCRBY", KEYS, MEMBERS, INTEGERS),
    words(b"HSCAN", KEYS, pick(b"0", b"x"), b"COUNT", b"1000", SCAN_OPTIONS),
)
LISTS = st.one_of(
    words(pick(b"LPUSH", b"RPUSH"), KEYS, some(VALUES, least=1)),
    words(pick(b"LPOP", b"RPOP"), KEYS, some(COUNTS, most=2)),
    words(pick(b"LRANGE", b"LTRIM"), KEYS, COUNTS, COUNTS),
    words(b"LLEN", KEYS),
    words(b"LINDEX", KEYS, COUNTS),
    words(b"LREM", KEYS, COUNTS, VALUES),
)
SETS = st.one_of(
    words(pick(b"SADD", b"SREM", b"SMISMEMBER"), KEYS, some(MEMBERS, least=1)),
    words(pick(b"SMEMBERS", b"SCARD"), KEYS),
    words(b"SISMEMBER", KEYS, MEMBERS),
    words(b"SPOP", KEYS, pick(b"100", b"0", b"-1", b"x"), some(pick(b"1"), most=1)),
    words(b"SSCAN", KEYS, pick(b"0", b"x"), b"COUNT", b"1000", SCAN_OPTIONS),
)
SORTED_SETS = st.one_of(
    words(b"ZADD", KEYS, some(pick(b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR")), SCORED),
    words(b"ZADD", KEYS, EQUAL_SCORES),
    words(b"ZREM", KEYS, some(MEMBERS, least=1)),
    words(pick(b"ZPOPMIN", b"ZPOPMAX"), KEYS, some(COUNTS)),
    words(pick(b"ZSCORE", b"ZRANK"), KEYS, MEMBERS),
    words(b"ZCARD", KEYS),
    words(pick(b"ZCOUNT", b"ZREMRANGEBYSCORE"), KEYS, BOUNDS, BOUNDS),
    words(b"ZRANGEBYSCORE", KEYS, BOUNDS, BOUNDS, RANGE_OPTIONS),
    words(b"ZRANGE", KEYS, COUNTS, COUNTS, RANGE_OPTIONS),
    words(b"ZRANGE", KEYS, BOUNDS, BOUNDS, b"BYSCORE", RANGE_OPTIONS),
)
LEX = st.one_of(
    words(b"ZADD", b"lex", EQUAL_SCORES),
    words(b"ZRANGE", b"lex", LEX_BOUNDS, LEX_BOUNDS, b"BYLEX", RANGE_OPTIONS),
)
TRANSACTIONS = st.one_of(
    words(pick(b"MULTI", b"MULTI", b"EXEC", b"EXEC", b"EXEC", b"DISCARD", b"UNWATCH", b"multi")),
    words(b"WATCH", some(KEYS, least=1)),
)
OTHERS = st.one_of(
    words(b"PING", some(MEMBERS, most=2)),
    words(b"ECHO", some(MEMBERS, most=2)),
    words(b"SELECT", pick(b"0", b"1", b"16", b"-1", b"x")),
    words(b"WAIT", pick(b"0", b"x"), pick(b"0", b"-1", b"x")),
    words(b"ROLE"),
    words(b"PUBLISH", pick(b"news", b"olds"), MEMBERS),
    words(b"PUBSUB", pick(b"NUMPAT", b"NUMSUB", b"CHANNELS", b"foo"), some(pick(b"news", b"*"), most=1)),
    words(b"CLIENT", pick(b"GETNAME", b"FOO", b"NO-EVICT"), some(pick(b"on", b"x"), most=1)),
    words(b"CLIENT", b"SETNAME", pick(b"me", b"a b", b"")),
    words(b"CLIENT", b"UNBLOCK", pick(b"x", b"987654"), some(pick(b"TIMEOUT", b"ERROR", b"x"), most=2)),
    words(b"CLIENT", b"KILL", pick(b"ID", b"TYPE", b"SKIPME", b"x"), pick(b"987654", b"0", b"x")),
    words(b"SCRIPT", pick(b"EXISTS", b"FLUSH", b"FOO"), some(pick(b"SYNC", b"f" * 40), most=2)),
    words(b"EVALSHA", pick(b"f" * 40, b"x"), pick(b"0", b"1", b"-1", b"x"), some(KEYS)),
    words(b"FUNCTION", b"FLUSH", some(pick(b"SYNC", b"x"), most=1)),
    words(b"OBJECT", b"ENCODING"),
    words(b"MEMORY", b"USAGE", b"never", some(pick(b"SAMPLES", b"0", b"-1", b"x"), most=2)),
    words(b"COMMAND", b"GETKEYS", pick(b"GET", b"MSET", b"PING", b"foo", b"DEL"), some(pick(b"a", b"b"))),
    words(pick(b"GOT", b"get a", b"\x00", b"x" * 200, b"a\r\nb"), some(VALUES)),
    words(b"CONFIG", b"SET", pick(b"maxmemory", b"timeout", b"foo", b"appendfsync", b"databases"), pick(b"x", b"-1")),
    words(b"AUTH", some(pick(b"default", b"me", b"x"), least=1)),
    words(b"HELLO", pick(b"4", b"x", b"1"), some(pick(b"AUTH", b"x", b"SETNAME"), most=2)),
)
COMMAND = st.one_of(STRINGS, GENERIC, HASHES, LISTS, SETS, SORTED_SETS, LEX, TRANSACTIONS, TRANSACTIONS, OTHERS)


@st.composite
def damaged(draw: st.DrawFn) -> Words:
    """A command with a word too many or too few."""
    command = list(draw(COMMAND))
    if draw(st.booleans()) and len(command) > 1:
        del command[draw(st.integers(1, len(command) - 1))]
    else:
        command.insert(draw(st.integers(1, len(command))), draw(VALUES))
    return tuple(command)


ANYTHING = st.one_of(COMMAND, damaged())


def is_comparable(command: Words) -> bool:
    """SPOP without a count and RANDOMKEY return random members."""
    name = command[0].upper()
    return not (name == b"SPOP" and (len(command) == 2 or command[2] in (b"1", b"2")))


FAMILIES = (STRINGS, HASHES, LISTS, SETS, st.one_of(SORTED_SETS, LEX))


def steps_of(family: st.SearchStrategy[Words]) -> st.SearchStrategy[list[OperationFunction]]:
    """Mostly commands of one kind, so that they work on each other's values; sometimes any command."""
    command = st.one_of(st.just(family), st.just(family), st.just(family), st.just(GENERIC), st.just(ANYTHING))
    step = st.tuples(st.integers(0, SPEAKERS - 1), command.flatmap(lambda chosen: chosen).filter(is_comparable))
    return st.lists(step, min_size=5, max_size=40)


STEPS = st.sampled_from(FAMILIES).flatmap(steps_of)
