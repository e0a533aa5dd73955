"""append_once for rows with the same fields in all of them: the common shape, packed without a step for each row.

The same marker as ``Once``, the same digest, byte for byte: a replay may take the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.operations.once import ROW_WORDS, Once
from millstream.broker.scripts import load_script, script
from millstream.broker.site import Site
from millstream.errors import ServerError
from millstream.spark.errors import RowsMiscounted
from millstream.wire.commands import Command, Conversation, Packed

NO_TRIM = (b"0",)


class UniformRows(Sequence[list[bytes]]):
    """Rows ``[name, value, name, value, ...]`` with the same names in all, kept as the names and a list for each."""

    __slots__ = ("columns", "names")

    def __init__(self, names: Sequence[bytes], columns: Sequence[list[bytes]]) -> None:
        self.names = tuple(names)
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return UniformRows(self.names, [column[at] for column in self.columns])
        return [word for name, column in zip(self.names, self.columns, strict=True) for word in (name, column[at])]

    def size(self) -> int:
        """The values' bytes."""
        return sum(sum(map(len, column)) for column in self.columns)

    def packed(self) -> bytes:
        """Each row as a RESP array of its words: what the digest is taken of."""
        return self._joined(b"*%d\r\n" % (2 * len(self.names)))

    def values(self) -> list[bytes]:
        """Row by row, each row's in the order of the names: as the script takes them."""
        width = len(self.columns)
        if width == 1:
            return self.columns[0]
        flat = [b""] * (width * len(self))
        for at, column in enumerate(self.columns):
            flat[at::width] = column
        return flat

    def packed_values(self) -> bytes:
        """``values`` as bulk strings."""
        values = self.values()
        lengths = list(map(len, values))
        heads = {length: b"$%d\r\n" % length for length in set(lengths)}
        parts = [b"\r\n"] * (3 * len(values))
        parts[0::3] = map(heads.__getitem__, lengths)
        parts[1::3] = values
        return b"".join(parts)

    def _joined(self, head: bytes) -> bytes:
        """Before each value a text that depends on nothing but the value's length: one join for all rows."""
        each = 2 * len(self.names) + 1
        parts = [b"\r\n"] * (each * len(self))
        for at, (name, column) in enumerate(zip(self.names, self.columns, strict=True)):
            # The value before it, or the row's head, ends where this name begins.
            before = b"%b$%d\r\n%b\r\n$" % (b"\r\n" if at else head, len(name), name)
            lengths = list(map(len, column))
            heads = {length: b"%b%d\r\n" % (before, length) for length in set(lengths)}
            parts[2 * at :: each] = map(heads.__getitem__, lengths)
            parts[2 * at + 1 :: each] = column
        return b"".join(parts)


class BulkOnce(Once):
    """A writer of ``append_once`` that also takes UniformRows. Ids are not told: a sink has no use for them."""

    def append_uniform(self, site: Site, rows: UniformRows) -> Conversation[tuple[int, int]]:
        """Rows added and rows skipped. Raises as ``append`` does."""
        if self._durability is not None or self._trim != NO_TRIM or 2 * len(rows.names) > ROW_WORDS:
            appended = yield from self.append_rows(site, list(rows))
            return appended.added, appended.skipped
        skipped = self._skip(rows, [])
        todo = rows[skipped:]
        while todo:
            chunk = _first_chunk(todo, site)
            reply, ahead = yield from self._send(chunk)
            if reply[0] == b"OK":
                if int(reply[1]) != len(chunk):
                    raise RowsMiscounted(len(chunk), int(reply[1]))
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
        chosen = script("append_once_uniform")
        head = chosen.words(
            (self._stream, self._markers),
            (
                *(self._partition, self._version, b"%d" % self.position),
                *(self.digest.word(), ahead.word(), self._ttl),
                *(b"%d" % len(rows.names), *rows.names),
            ),
        )
        words = Packed((*head, *rows.values()))
        start = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in head)
        words.data = b"*%d\r\n%b%b" % (len(words), start, rows.packed_values())
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
    while len(chunk) > 1 and chunk.size() > site.limits.script_bytes:
        chunk = chunk[: len(chunk) // 2]
    return chunk
