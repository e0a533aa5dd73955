"""SCAN and its kin: the order in which names are paged through, cursors, and the words behind them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from zlib import crc32

from millstream.engine.glob import glob
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.wire import ErrorReply

KEPT_ORDERS: Final = 16

Place = tuple[int, bytes | None]
"""A database's number, and the key whose members are scanned; None for the keys themselves."""


class ScanOrders:
    __slots__ = ("_orders",)

    def __init__(self) -> None:
        self._orders: dict[Place, list[tuple[int, bytes]]] = {}

    def page(self, place: Place, names: Iterable[bytes], cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor (0: the end) and ``count`` names, or a few more that share a place. Some may be gone by now.

        The first call of a scan takes a new order, so that no scan misses what was there when it began.
        """
        order = self._orders.pop(place, None) if cursor else None
        if order is None:
            order = sorted((crc32(name) + 1, name) for name in names)
        start = bisect_left(order, (cursor,))
        end = min(start + count, len(order))
        while 0 < end < len(order) and order[end][0] == order[end - 1][0]:
            end += 1
        following = order[end][0] if end < len(order) else 0
        if following:
            self._keep(place, order)
        return following, [name for _, name in order[start:end]]

    def _keep(self, place: Place, order: list[tuple[int, bytes]]) -> None:
        self._orders.pop(place, None)
        self._orders[place] = order
        while len(self._orders) > KEPT_ORDERS:
            del self._orders[next(iter(self._orders))]


_CURSOR: Final = re.compile(rb"([+-]?)0*([0-9]{1,20})")


class ScanOptions:
    __slots__ = ("count", "fits", "kind")

    def __init__(self, words: Sequence[bytes], *, with_type: bool = False) -> None:
        self.fits: Callable[[bytes], bool] = _anything
        self.count = 10
        self.kind: bytes | None = None
        for at in range(0, len(words), 2):
            name = words[at].upper()
            if at + 1 == len(words):
                raise ErrorReply(SYNTAX_ERROR)
            if name == b"COUNT":
                self.count = parse_int(words[at + 1])
                if self.count < 1:
                    raise ErrorReply(SYNTAX_ERROR)
            elif name == b"MATCH":
                self.fits = glob(words[at + 1]).matches
            elif name == b"TYPE" and with_type:
                self.kind = words[at + 1].lower()
            else:
                raise ErrorReply(SYNTAX_ERROR)


def _anything(name: bytes) -> bool:
    return True


def parse_cursor(raw: bytes) -> int:
    found = _CURSOR.fullmatch(raw)
    if found is None or int(found[2]) >= 2**64:
        raise ErrorReply("ERR invalid cursor")
    return int(found[1] + found[2]) % 2**64
