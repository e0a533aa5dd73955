"""Work in bulk: commands that are packed with a few steps for all of them, and the collector paused meanwhile."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any, overload

from millstream.wire import Args, pack


class InBulk(Sequence[Args]):
    """A sequence of plain commands to whoever wants that; a link to a server takes ``packed`` instead."""

    __slots__ = ()

    @abstractmethod
    def packed(self) -> bytes | memoryview:
        """All commands as they travel."""


class Joined(InBulk):
    """Commands one after the other, those in bulk among them left as they are."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Sequence[Args]) -> None:
        self._parts: list[Sequence[Args]] = [
            one for part in parts for one in (part._parts if isinstance(part, Joined) else (part,))
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
        """``packed``, without a copy of what is in bulk."""
        plain: list[bytes] = []
        for part in self._parts:
            if isinstance(part, InBulk):
                yield b"".join(plain)
                yield part.packed()
                plain = []
            else:
                plain += map(pack, part)
        yield b"".join(plain)


class SameShape(InBulk):
    """Commands that begin alike and go on with the same field names, each with its own values."""

    __slots__ = ("_head", "_names", "_values")

    def __init__(self, head: Args, names: Args, values: list[bytes]) -> None:
        self._head = head
        self._names = names
        self._values = values
        """All values, command after command."""

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    @overload
    def __getitem__(self, at: int) -> Args: ...

    @overload
    def __getitem__(self, at: slice) -> SameShape: ...

    def __getitem__(self, at: int | slice) -> Args | SameShape:
        width = len(self._names)
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            return SameShape(self._head, self._names, self._values[start * width : stop * width])
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
        return (*self._head, *(word for pair in zip(self._names, values, strict=True) for word in pair))

    def size(self) -> int:
        """About how many bytes all of them take."""
        return sum(map(len, self._values)) + len(self) * sum(len(word) + 10 for word in (*self._head, *self._names))

    def packed(self) -> bytes:
        """All commands as they travel.

        What stands before a value depends on its column and its length alone. So each such text is made once, texts and
        values are laid side by side, and one join does the rest.
        """
        width = len(self._names)
        parts = [b""] * (2 * len(self._values))
        for column, name in enumerate(self._names):
            before = b"\r\n$%d\r\n%b\r\n$" % (len(name), name)
            if column == 0:
                start = b"\r\n*%d" % (len(self._head) + 2 * width)
                before = start + b"".join(b"\r\n$%d\r\n%b" % (len(word), word) for word in self._head) + before
            values = self._values[column::width]
            lengths = list(map(len, values))
            texts = {length: b"%b%d\r\n" % (before, length) for length in set(lengths)}
            parts[2 * column :: 2 * width] = map(texts.__getitem__, lengths)
            parts[2 * column + 1 :: 2 * width] = values
        parts[0] = parts[0][2:]
        parts.append(b"\r\n")
        return b"".join(parts)


def same_shape(head: Args, entries: Sequence[Mapping[Any, Any]], max_entry_bytes: int) -> SameShape | None:
    """The entries as columns, if all of them have the same fields in the same order and plain bytes as values.

    None says that they must be looked at one by one, whatever the reason: too large, another type, an empty entry.
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
    return SameShape(head, names, values)


@contextmanager
def gc_paused() -> Iterator[None]:
    """For whoever makes thousands of small objects, none of them garbage: searching them again and again costs more
    than making them. For moments, or in processes that are ours: it rests for everybody."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
