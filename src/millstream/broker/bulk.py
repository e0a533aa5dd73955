"""Many commands packed at once without a Python loop for each, and a pause of the garbage collector meanwhile."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any, overload

from millstream.wire import Args, pack


class PackedCommands(Sequence[Args]):
    """A sequence of commands that can also be packed as a whole; server transports use ``packed``."""

    __slots__ = ()

    @abstractmethod
    def packed(self) -> bytes | memoryview:
        """All commands as bytes, as they are sent."""


class CombinedCommands(PackedCommands):
    """Several sequences of commands, one after another; parts that are ``PackedCommands`` stay as they are."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Sequence[Args]) -> None:
        self._parts: list[Sequence[Args]] = [
            inner for part in parts for inner in (part._parts if isinstance(part, CombinedCommands) else (part,))
        ]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __iter__(self) -> Iterator[Args]:
        return chain.from_iterable(self._parts)

    def packed(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The pieces of ``packed``, without copying those that are packed already."""
        plain: list[bytes] = []
        for part in self._parts:
            if isinstance(part, PackedCommands):
                yield b"".join(plain)
                yield part.packed()
                plain = []
            else:
                plain += map(pack, part)
        yield b"".join(plain)


class UniformCommands(PackedCommands):
    """Commands with the same first arguments and the same field names; each has its own values."""

    __slots__ = ("_head", "_names", "_values")

    def __init__(self, head: Args, names: Args, values: list[bytes]) -> None:
        self._head = head
        self._names = names
        self._values = values
        """The values of all commands, command after command."""

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    @overload
    def __getitem__(self, at: int) -> Args: ...

    @overload
    def __getitem__(self, at: slice) -> UniformCommands: ...

    def __getitem__(self, at: int | slice) -> Args | UniformCommands:
        width = len(self._names)
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            return UniformCommands(self._head, self._names, self._values[start * width : stop * width])
        at = range(len(self))[at]
        return self._command(self._values[at * width : (at + 1) * width])

    def __iter__(self) -> Iterator[Args]:
        if len(self._names) == 1:
            start = (*self._head, *self._names)
            for value in self._values:
                yield (*start, value)
            return
        columns = [iter(self._values)] * len(self._names)
        yield from map(self._command, zip(*columns, strict=True))

    def _command(self, values: Sequence[bytes]) -> Args:
        return (*self._head, *(arg for pair in zip(self._names, values, strict=True) for arg in pair))

    def size(self) -> int:
        """The approximate size of all commands in bytes."""
        return sum(map(len, self._values)) + len(self) * sum(len(arg) + 10 for arg in (*self._head, *self._names))

    def packed(self) -> bytes:
        """All commands as bytes, as they are sent.

        The bytes before a value depend only on its column and its length. Each such prefix is built once; prefixes and
        values are then interleaved and joined.
        """
        width = len(self._names)
        parts = [b""] * (2 * len(self._values))
        for column, name in enumerate(self._names):
            before = b"\r\n$%d\r\n%b\r\n$" % (len(name), name)
            if column == 0:
                start = b"\r\n*%d" % (len(self._head) + 2 * width)
                before = start + b"".join(b"\r\n$%d\r\n%b" % (len(arg), arg) for arg in self._head) + before
            values = self._values[column::width]
            lengths = list(map(len, values))
            texts = {length: b"%b%d\r\n" % (before, length) for length in set(lengths)}
            parts[2 * column :: 2 * width] = map(texts.__getitem__, lengths)
            parts[2 * column + 1 :: 2 * width] = values
        parts[0] = parts[0][2:]
        parts.append(b"\r\n")
        return b"".join(parts)


def uniform_commands(head: Args, entries: Sequence[Mapping[Any, Any]], max_entry_bytes: int) -> UniformCommands | None:
    """The entries as columns, if all have the same fields in the same order and values of type bytes.

    Returns None if the caller must handle the entries one by one: different fields, other types, an empty or too large
    entry.
    """
    try:
        fields = tuple(entries[0])
        if len(fields) == 1 and set(map(len, entries)) == {1}:
            values = list(map(itemgetter(fields[0]), entries))  # the most common shape; there is no order to compare
        elif set(map(tuple, entries)) == {fields}:
            values = [value for entry in entries for value in entry.values()]
        else:
            return None
        names = tuple(name.encode("utf-8", "surrogateescape") if type(name) is str else name for name in fields)
    except (TypeError, AttributeError, LookupError, UnicodeEncodeError):
        return None
    if not names or set(map(type, values)) != {bytes} or set(map(type, names)) != {bytes}:
        return None
    if max(map(len, values)) * len(names) + sum(map(len, names)) > max_entry_bytes:
        return None
    return UniformCommands(head, names, values)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the garbage collector while many small objects are created, none of which is garbage.

    The collector would scan them repeatedly, which costs more than creating them. It is disabled for the whole process,
    so use this only for short sections.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
