"""SCAN's cursor: a place in the order of the names' checksums. It stays good whatever comes and goes in between.

A name's place never changes, so whoever is there from the first call of a scan to its last is seen. The sorted order is
kept between calls only to save time; a scan whose order was thrown away goes on with a new one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final
from zlib import crc32

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
