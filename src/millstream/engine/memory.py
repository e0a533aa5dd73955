"""How much memory the data takes: an estimate in the way of Redis's MEMORY USAGE, from a few elements of each value."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database

SAMPLED_KEYS: Final = 20_000
KEY_OVERHEAD: Final = 100
"""What a key costs beside its bytes: its slot in the dict, which is never full."""


def size_of_key(key: bytes, value: Any, samples: int = 5) -> int:
    """A key and its value, in bytes. ``samples`` elements are looked at; 0 looks at all."""
    return getsizeof(key) + KEY_OVERHEAD + size_of_value(value, samples)


def size_of_value(value: Any, samples: int = 5) -> int:
    if isinstance(value, bytes):
        return getsizeof(value)
    kept: int | None = getattr(value, "memory_bytes", None)
    if kept is not None:
        return kept
    if isinstance(value, dict):
        return getsizeof(value) + _estimate(value.items(), len(value), samples)
    return getsizeof(value) + _estimate(((item,) for item in value), len(value), samples)


def _estimate(rows: Iterable[tuple[Any, ...]], length: int, samples: int) -> int:
    looked_at = list(islice(rows, samples or None))
    if not looked_at:
        return 0
    return sum(getsizeof(item) for row in looked_at for item in row) * length // len(looked_at)


def _size_of_database(db: Database) -> int:
    """From every key, or of very many from every n-th, so that whoever polls INFO does not hold everybody up."""
    step = len(db.values) // SAMPLED_KEYS + 1
    sizes = [size_of_key(key, value) for key, value in islice(db.values.items(), 0, None, step)]
    return sum(sizes) * len(db.values) // len(sizes) if sizes else 0


class MemoryAccount:
    """The sum over all keys. With a limit in force it is kept up to date key by key; without one it is computed when
    somebody asks, because then nobody asks often."""

    __slots__ = ("_databases", "_sizes", "_total", "_touched", "limit")

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._sizes: dict[tuple[int, bytes], int] = {}
        self._touched: dict[tuple[int, bytes], None] = {}
        self._total = 0
        self.limit = 0

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.recount()
        for db in self._databases:
            db.refresh()

    def touch(self, index: int, key: bytes) -> None:
        self._touched[index, key] = None

    def used(self) -> int:
        if not self.limit:
            return sum(map(_size_of_database, self._databases))
        for index, key in self._touched:
            value = self._databases[index].values.get(key)
            old = self._sizes.pop((index, key), 0)
            if value is not None:
                new = self._sizes[index, key] = size_of_key(key, value)
                self._total += new
            self._total -= old
        self._touched.clear()
        return self._total

    def exceeded(self) -> bool:
        return 0 < self.limit < self.used()

    def recount(self) -> None:
        """After everything was flushed or loaded, or the limit has come or gone."""
        self._touched.clear()
        self._sizes.clear()
        if self.limit:
            for db in self._databases:
                for key, value in db.values.items():
                    self._sizes[db.index, key] = size_of_key(key, value)
        self._total = sum(self._sizes.values())
