"""Results and helpers of idempotent appends: the digest of rows, ``Appended``, ``RowsMissing``, and writers that keep
their position and digest.
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
    from millstream.broker.scripts.append_once.call import Once


WEEK_MS = 7 * 24 * 3600 * 1000
UNKNOWN = b"-"
"""In place of a digest: unknown, and not compared."""


class Digest:
    """A rolling digest over rows: independent of how the rows are split into chunks.

    It covers the values as bulk strings, and the names as an array whenever they differ from the previous row. So
    different sequences of rows have different input, and rows that are packed for the server need not be packed again.
    """

    __slots__ = ("_names", "_state")

    def __init__(self) -> None:
        # SHA-256, because most processors have instructions for it. 128 bits of it detect accidental differences.
        self._state = sha256(usedforsecurity=False)
        self._names: tuple[bytes, ...] = ()

    def add(self, rows: Iterable[Sequence[bytes]]) -> None:
        """Adds rows, each with names and values in turn."""
        parts: list[bytes] = []
        for row in rows:
            if (names := tuple(row[::2])) != self._names:
                self._names = names
                parts.append(pack(names))
            parts += [b"$%d\r\n%b\r\n" % (len(value), value) for value in row[1::2]]
        self._state.update(b"".join(parts))

    def add_packed(self, names: tuple[bytes, ...], values: bytes | memoryview) -> None:
        """Adds rows with the same names: each value as a RESP bulk string, row after row."""
        if names != self._names:
            self._names = names
            self._state.update(pack(names))
        self._state.update(values)

    def copy(self) -> Digest:
        duplicate = Digest()
        duplicate.adopt(self)
        return duplicate

    def adopt(self, other: Digest) -> None:
        """Takes over the state of another digest."""
        self._state = other._state.copy()
        self._names = other._names

    def hexdigest(self) -> bytes:
        """The first 128 bits in hexadecimal."""
        return self._state.hexdigest()[:32].encode()


class Appended(NamedTuple):
    """The result of an idempotent append.

    ``ids`` has one item for each entry: its id, or None if the entry was stored already and its id is unknown. If the
    connection broke and the transport repeated the call, entries that the first try stored count as skipped.
    """

    ids: list[EntryId | None]
    added: int
    skipped: int


class RowsMissing(MillstreamError):
    """``append_once``: the stream has recorded fewer rows than this writer has appended.

    A failover lost them, or the marker was forgotten because the writer was silent for too long. ``rows`` is what the
    stream has recorded, ``position`` is the writer's.
    """

    rows: int
    position: int

    def __init__(self, writer: str, *, rows: int, position: int) -> None:
        super().__init__(
            f"writer {writer!r} is at row {position}, but the stream has recorded only {rows} of its rows. "
            "Replay the batch from row 0: stored rows are skipped.",
            writer=writer,
            rows=rows,
            position=position,
        )


class OnceWriter:
    """One writer of one partition, starting at row 0: keeps its position and its rolling digest.

    Call ``append`` with chunks of any size; ``finish`` checks that a replay did not have fewer rows than are stored.
    Use it from one task at a time, because rows have an order.
    """

    def __init__(self, broker: Broker, once: Once) -> None:
        self._broker = broker
        self._once = once

    @property
    def position(self) -> int:
        """The number of rows appended or skipped so far."""
        return self._once.position

    async def append(self, entries: Sequence[Fields]) -> Appended:
        return await self._broker.run(self._once.append, entries)

    async def finish(self) -> None:
        await self._broker.run(self._once.finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Calls ``finish``, unless an error was raised."""
        if kind is None:
            await self.finish()


class BlockingOnceWriter:
    """``OnceWriter`` for threads."""

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

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.finish()
