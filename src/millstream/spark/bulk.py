"""append_once for rows of one field each, the same field in all: the common shape, packed without a step for each row.

The same protocol as ``Once``, the same digest, byte for byte: a replay may take the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.operations.once import Once
from millstream.broker.scripts import load_script, script
from millstream.broker.site import Site
from millstream.errors import ServerError
from millstream.wire.commands import Command, Conversation, Packed


class UniformRows(Sequence[list[bytes]]):
    """Rows ``[name, value]``, kept as one name and a list of values."""

    __slots__ = ("name", "values")

    def __init__(self, name: bytes, values: list[bytes]) -> None:
        self.name = name
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Any) -> Any:
        return UniformRows(self.name, self.values[at]) if isinstance(at, slice) else [self.name, self.values[at]]

    def packed(self) -> bytes:
        """Each row as a RESP array of two words: what the digest is taken of."""
        return self._joined(b"*2\r\n")

    def words(self) -> list[bytes]:
        """Each row as the script takes it: the number of its words, then those."""
        flat = [b"2", self.name, b""] * len(self.values)
        flat[2::3] = self.values
        return flat

    def packed_words(self) -> bytes:
        """``words`` as bulk strings."""
        return self._joined(b"$1\r\n2\r\n")

    def _joined(self, head: bytes) -> bytes:
        """Before each value a text that depends on nothing but the value's length: one join for all rows."""
        before = b"%b$%d\r\n%b\r\n$" % (head, len(self.name), self.name)
        lengths = list(map(len, self.values))
        heads = {length: b"%b%d\r\n" % (before, length) for length in set(lengths)}
        parts = [b"\r\n"] * (3 * len(lengths))
        parts[0::3] = map(heads.__getitem__, lengths)
        parts[1::3] = self.values
        return b"".join(parts)


class BulkOnce(Once):
    """A writer of ``append_once`` that also takes UniformRows. Ids are not told: a sink has no use for them."""

    def append_uniform(self, site: Site, rows: UniformRows) -> Conversation[tuple[int, int]]:
        """Rows added and rows skipped. Raises as ``append`` does."""
        if self._durability is not None:
            appended = yield from self.append_rows(site, list(rows))
            return appended.added, appended.skipped
        skipped = self._skip(rows, [])
        todo = rows[skipped:]
        while todo:
            chunk = _first_chunk(todo, site)
            reply, ahead = yield from self._send(chunk)
            if reply[0] == b"OK":
                assert len(reply) == len(chunk) + 1
                self.position += len(chunk)
                self.digest = ahead
                todo = todo[len(chunk) :]
            else:
                self._refused(reply)
                known = self._skip(todo, [])
                skipped += known
                todo = todo[known:]
        return len(rows) - skipped, skipped

    def _send(self, rows: UniformRows) -> Conversation[tuple[list[Any], Any]]:
        assert self.digest is not None
        ahead = self.digest.copy()
        ahead.add_packed(rows.packed())
        chosen = script("append_once")
        head = chosen.words(
            (self._stream, self._markers),
            (
                *(self._partition, self._version, b"%d" % self.position),
                *(self.digest.word(), ahead.word(), self._ttl, *self._trim),
            ),
        )
        words = Packed((*head, *rows.words()))
        start = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in head)
        words.data = b"*%d\r\n%b%b" % (len(words), start, rows.packed_words())
        call = Command(words, self._stream, repeatable=True)
        try:
            reply: list[Any] = yield call
        except ServerError as error:
            if error.code != "NOSCRIPT":
                raise
            yield from load_script(chosen, self._stream)
            reply = yield call
        return reply, ahead

    def _move(self, rows: Sequence[list[bytes]]) -> None:
        if isinstance(rows, UniformRows) and self.digest is not None:
            self.position += len(rows)
            self.digest.add_packed(rows.packed())
        else:
            super()._move(rows)


def _first_chunk(rows: UniformRows, site: Site) -> UniformRows:
    """As many rows as one call of the script may carry."""
    most = site.limits.script_entries
    chunk: UniformRows = rows[:most]
    while len(chunk) > 1 and sum(map(len, chunk.values)) > site.limits.script_bytes:
        chunk = chunk[: len(chunk) // 2]
    return chunk
