"""A long random sequence of stream commands that uses existing ids, so that most commands have an effect.

Hypothesis finds unusual arguments and small failures; this finds interactions of commands. A seed reproduces a run.

No node limit is smaller than an entry: there Redis 7.0.15 keeps a stale pointer to the new node, and crashes later
(CONFIG SET stream-node-max-bytes 100, XADD, the same with 60, XADD of more than 60 bytes, XRANGE).
"""

from __future__ import annotations

import random
from collections import deque

from stream_commands import words_of
from two_servers import OperationFunction, Words

ODD = words_of("0 -1 x ~ = $ > - + 1-1-1 18446744073709551615 (3-0 COUNT 99999999999999999999 '' 7-* nonsense s g")
VALUES = words_of("'' v 7 -1 128 4096 9223372036854775807 9223372036854775808") + tuple(
    b"x" * length for length in (19, 63, 64, 85, 85, 85, 126, 300)
)


class Walk:
    def __init__(self, seed: int, *, speakers: int) -> None:
        self._chance = random.Random(seed)
        self._speakers = speakers
        self._time = 1
        self._ids: deque[bytes] = deque(maxlen=25)
        self._planned: deque[Words] = deque()
        """Commands that must follow soon: a key that was replaced by a string is deleted."""
        self._commands = [
            (30, self._add),
            (6, self._delete),
            (5, self._trim),
            (1, self._set_id),
            (12, self._read_group),
            (4, self._read_history),
            (10, self._acknowledge),
            (8, self._claim),
            (6, self._autoclaim),
            (6, self._pending),
            (6, self._range),
            (3, self._read),
            (6, self._info),
            (6, self._group),
            (3 if speakers > 1 else 1, self._around),
            (10 if speakers > 1 else 0, self._wait),
        ]

    def steps(self, count: int) -> list[OperationFunction]:
        steps: list[OperationFunction] = [(0, words) for words in self._beginning()]
        while len(steps) < count:
            speaker = self._chance.randrange(self._speakers)
            if self._speakers > 1 and self._chance.random() < 0.05:
                inside = [self._command() for _ in range(self._chance.randrange(1, 5))]
                steps += [(speaker, words) for words in ((b"MULTI",), *inside, (b"EXEC",))]
            else:
                steps.append((speaker, self._command()))
        return steps

    def _beginning(self) -> list[Words]:
        create = words_of("XGROUP CREATE s g 0 MKSTREAM"), words_of("XGROUP CREATE t g $ MKSTREAM")
        return [*(self._add() for _ in range(self._chance.randrange(10))), *create]

    def _command(self) -> Words:
        chance = self._chance
        if self._planned and chance.random() < 0.4:
            return self._planned.popleft()
        weights, makers = zip(*self._commands, strict=True)
        (make,) = chance.choices(makers, weights)
        words = list(make())
        if chance.random() < 0.04 and words[0] != b"CONFIG":
            words[chance.randrange(1, len(words))] = chance.choice(ODD)
        if chance.random() < 0.01:
            del words[chance.randrange(1, len(words))]
        return tuple(words)

    # --- words ------------------------------------------------------------------------------------------------------

    def _key(self) -> bytes:
        return self._chance.choices((b"s", b"t", b"u"), (20, 2, 1))[0]

    def _name(self) -> bytes:
        return self._chance.choices((b"g", b"h", b"none"), (20, 4, 1))[0]

    def _consumer(self) -> bytes:
        return self._chance.choice((b"alice", b"bob", b"al"))

    def _id(self) -> bytes:
        chance = self._chance
        if not self._ids or chance.random() < 0.1:
            return b"%d-%d" % (chance.randrange(self._time + 3), chance.choice((0, 0, 1)))
        return chance.choice(self._ids)

    def _some_ids(self, limit: int = 5) -> Words:
        return tuple(self._id() for _ in range(self._chance.randint(1, limit)))

    def _number(self) -> bytes:
        return b"%d" % self._chance.choice((0, 1, 1, 2, 3, 5, 8, 20, 1000))

    def _idle(self) -> bytes:
        return self._chance.choices((b"0", b"1000000"), (4, 1))[0]

    def _maybe(self, line: str | Words, share: float = 0.4) -> Words:
        if self._chance.random() >= share:
            return ()
        return words_of(line) if isinstance(line, str) else line

    def _trim_words(self) -> Words:
        sign = self._chance.choice(((), (b"=",), (b"~",), (b"~",)))
        draw = self._chance.choice(((b"MAXLEN", *sign, self._number()), (b"MINID", *sign, self._id())))
        return draw + (self._maybe((b"LIMIT", self._number())) if sign == (b"~",) else ())

    # --- commands ---------------------------------------------------------------------------------------------------

    def _add(self) -> Words:
        chance = self._chance
        self._time += chance.choice((0, 1, 1, 1, 3, 200))
        entry_id = b"%d-*" % self._time
        if chance.random() < 0.7:
            self._time += 1
            entry_id = b"%d-0" % self._time
            self._ids.append(entry_id)
        names = chance.choice(((b"f",), (b"f",), (b"f",), (b"f", b"g"), (b"other",)))
        fields = tuple(word for name in names for word in (name, chance.choice(VALUES)))
        options = self._maybe("NOMKSTREAM", 0.05) + self._maybe(self._trim_words(), 0.15)
        return b"XADD", self._key(), *options, entry_id, *fields

    def _delete(self) -> Words:
        return b"XDEL", self._key(), *self._some_ids()

    def _trim(self) -> Words:
        return b"XTRIM", self._key(), *self._trim_words()

    def _set_id(self) -> Words:
        options = self._maybe((b"ENTRIESADDED", self._number())) + self._maybe((b"MAXDELETEDID", self._id()))
        return b"XSETID", self._key(), self._chance.choice((self._id(), b"%d-0" % (self._time + 1))), *options

    def _reader(self) -> Words:
        return b"XREADGROUP", b"GROUP", self._name(), self._consumer()

    def _read_group(self) -> Words:
        options = self._maybe((b"COUNT", self._number()), 0.7) + self._maybe("NOACK", 0.1)
        return *self._reader(), *options, b"STREAMS", *self._chance.choice(((b"s", b">"), (b"s", b"t", b">", b">")))

    def _read_history(self) -> Words:
        start = self._chance.choice((b"0", self._id()))
        return *self._reader(), *self._maybe((b"COUNT", self._number())), b"STREAMS", self._key(), start

    def _acknowledge(self) -> Words:
        return b"XACK", self._key(), self._name(), *self._some_ids()

    def _claim(self) -> Words:
        chance = self._chance
        options = (
            *self._maybe("FORCE"),
            *self._maybe("JUSTID"),
            *self._maybe(chance.choice(((b"IDLE", b"5000000"), (b"TIME", b"5000000"), (b"IDLE", b"-1"))), 0.3),
            *self._maybe((b"RETRYCOUNT", self._number()), 0.2),
            *self._maybe((b"LASTID", self._id()), 0.1),
        )
        return b"XCLAIM", self._key(), self._name(), self._consumer(), self._idle(), *self._some_ids(), *options

    def _autoclaim(self) -> Words:
        options = self._maybe((b"COUNT", self._chance.choice((b"1", b"2", b"5")))) + self._maybe("JUSTID")
        start = self._chance.choice((b"0", b"-", self._id(), b"(" + self._id()))
        return b"XAUTOCLAIM", self._key(), self._name(), self._consumer(), self._idle(), start, *options

    def _pending(self) -> Words:
        if self._chance.random() < 0.3:
            return b"XPENDING", self._key(), self._name()
        idle, consumer = self._maybe((b"IDLE", self._idle()), 0.2), self._maybe((self._consumer(),))
        return b"XPENDING", self._key(), self._name(), *idle, *self._interval(), self._number(), *consumer

    def _interval(self) -> Words:
        low = self._chance.choice((b"-", self._id(), b"(" + self._id()))
        return low, self._chance.choice((b"+", self._id(), b"(" + self._id()))

    def _range(self) -> Words:
        low, high = self._interval()
        count = self._maybe((b"COUNT", self._number()))
        key = self._key()
        return self._chance.choice(((b"XRANGE", key, low, high, *count), (b"XREVRANGE", key, high, low, *count)))

    def _read(self) -> Words:
        count = self._maybe((b"COUNT", self._number()))
        return b"XREAD", *count, b"STREAMS", self._key(), self._chance.choice((b"0", b"$", self._id()))

    def _info(self) -> Words:
        key = self._key()
        full = (b"XINFO", b"STREAM", key, b"FULL", *self._maybe((b"COUNT", self._number())))
        remaining = (b"XINFO", b"STREAM", key), (b"XINFO", b"GROUPS", key), (b"XINFO", b"CONSUMERS", key, self._name())
        return self._chance.choice((full, *remaining, (b"XLEN", key)))

    def _group(self) -> Words:
        chance, key, name = self._chance, self._key(), self._name()
        reads = self._maybe((b"ENTRIESREAD", chance.choice((b"-1", self._number()))), 0.3)
        position = chance.choice((b"0", b"$", self._id()))
        made = (b"XGROUP", b"CREATE", key, name, position, *self._maybe("MKSTREAM"), *reads)
        if chance.random() < 0.1:
            self._planned.append((b"XGROUP", b"CREATE", key, name, b"0", b"MKSTREAM"))
            return b"XGROUP", b"DESTROY", key, name
        consumer = self._consumer()
        return chance.choice(
            (
                made,
                (b"XGROUP", b"SETID", key, name, position, *reads),
                (b"XGROUP", b"CREATECONSUMER", key, name, consumer),
                (b"XGROUP", b"DELCONSUMER", key, name, consumer),
            )
        )

    def _around(self) -> Words:
        chance, key = self._chance, self._key()
        draw = chance.random()
        if draw < 0.5:
            name, values = chance.choice((("entries", "1 2 3 10 100 0"), ("bytes", "1000 2000 4096 0")))
            return b"CONFIG", b"SET", b"stream-node-max-" + name.encode(), chance.choice(words_of(values))
        self._planned += [(b"DEL", key), (b"XGROUP", b"CREATE", key, b"g", b"0", b"MKSTREAM")]
        return chance.choice(((b"SET", key, b"x"), (b"DEL", key), (b"RENAME", key, self._key())))

    def _wait(self) -> Words:
        block = (*self._maybe((b"COUNT", b"1")), b"BLOCK", b"0", b"STREAMS")
        grouped = (*self._reader(), *self._maybe("NOACK", 0.1), *block)
        return self._chance.choice(
            (
                (*grouped, b"s", b">"),
                (*grouped, b"s", b">"),
                (*grouped, b"s", b"t", b">", b">"),
                (b"XREAD", *block, b"s", self._chance.choice((b"$", b"$", b"0", self._id()))),
            )
        )
