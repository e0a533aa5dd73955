"""What appending once compares and tells (the digest of rows, what was appended, which rows are missing), and writers
that keep their position and digest, for event loops and for threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Self

from millstream.broker.operations.conversion import Fields
from millstream.errors import MillstreamError
from millstream.model import EntryId
from millstream.wire import pack

if TYPE_CHECKING:
    from millstream.broker.blocking_broker import BlockingBroker
    from millstream.broker.broker import Broker
    from millstream.broker.steps.once.call import Once


WEEK_MS = 7 * 24 * 3600 * 1000
UNKNOWN = b"-"
"""In the place of a digest: not known, so not compared."""


class Digest:
    """A rolling digest over rows: the same rows give the same digest, however they are cut into chunks.

    It is taken of the values as bulk strings, and of the names as an array where they differ from the row before: so
    no two different sequences of rows look alike, and what travels to the server need not be packed a second time.
    """

    __slots__ = ("_names", "_state")

    def __init__(self) -> None:
        # SHA-256 because most processors have it in hardware; what could differ by accident needs no more bits of it.
        self._state = sha256(usedforsecurity=False)
        self._names: tuple[bytes, ...] = ()

    def add(self, rows: Iterable[Sequence[bytes]]) -> None:
        """Rows as words: names and values in turn."""
        parts: list[bytes] = []
        for row in rows:
            if (names := tuple(row[::2])) != self._names:
                self._names = names
                parts.append(pack(names))
            parts += [b"$%d\r\n%b\r\n" % (len(value), value) for value in row[1::2]]
        self._state.update(b"".join(parts))

    def add_packed(self, names: tuple[bytes, ...], values: bytes | memoryview) -> None:
        """Rows of the same names, row after row: each value as a RESP bulk string."""
        if names != self._names:
            self._names = names
            self._state.update(pack(names))
        self._state.update(values)

    def copy(self) -> Digest:
        twin = Digest()
        twin.adopt(self)
        return twin

    def adopt(self, other: Digest) -> None:
        self._state = other._state.copy()
        self._names = other._names

    def word(self) -> bytes:
        return self._state.hexdigest()[:32].encode()


class Appended(NamedTuple):
    """What an idempotent append did.

    ``ids`` has one item for each entry: its id, or None where it was there already and its id is not known.
    After a broken connection the link asks again: what the first try stored then counts as skipped.
    """

    ids: list[EntryId | None]
    added: int
    skipped: int


class RowsMissing(MillstreamError):
    """append_once: the stream has recorded fewer rows than this writer has already appended.

    A failover lost them, or the writer was silent for so long that its marker was forgotten.
    ``rows`` is what the stream has, ``position`` where the writer is.
    """

    rows: int
    position: int

    def __init__(self, writer: str, *, rows: int, position: int) -> None:
        super().__init__(
            f"writer {writer!r} is at row {position}, but the stream has recorded only {rows} of its rows. "
            "Replay the batch from row 0: what is there will be skipped.",
            writer=writer,
            rows=rows,
            position=position,
        )


class OnceWriter:
    """One writer of one partition, from row 0 on: keeps its position and its rolling digest.

    ``append`` may be called as often as needed, with chunks of any size; ``finish`` makes sure that a replay did not
    bring fewer rows than are stored. Not for several tasks at once: rows have an order.
    """

    def __init__(self, broker: Broker, once: Once) -> None:
        self._broker = broker
        self._once = once

    @property
    def position(self) -> int:
        """Rows appended or skipped so far."""
        return self._once.position

    async def append(self, entries: Sequence[Fields]) -> Appended:
        return await self._broker.run(self._once.append, entries)

    async def finish(self) -> None:
        await self._broker.run(self._once.finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finishes, unless an error is on its way."""
        if kind is None:
            await self.finish()


class BlockingOnceWriter:
    """The same for threads."""

    def __init__(self, broker: BlockingBroker, once: Once) -> None:
        self._broker = broker
        self._once = once

    @property
    def position(self) -> int:
        return self._once.position

    def append(self, entries: Sequence[Fields]) -> Appended:
        return self._broker.run(self._once.append, entries)

    def finish(self) -> None:
        self._broker.run(self._once.finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish()
