"""Applies a stream of changes strictly: an insert finds no row, an update and a delete find exactly the row before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
COMES_AND_GOES = frozenset(("extra",))
"""The column that the writers add and drop: a row may have it on one side only. Other columns must be on both sides."""


class StrictLedger:
    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Row]] = {}
        self.faults: list[str] = []
        self.ids: Counter[str] = Counter()
        self.transactions: dict[tuple[int, str], int] = {}
        """The batch in which each transaction's changes came."""
        self.batch = 0

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        self.batch += 1
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        self.ids[event["id"]] += 1
        rows = self.tables.setdefault(event["table"], {})
        key, op = event["key"], event["op"]
        before = None if event["before"] is None else json.loads(event["before"])
        after = None if event["after"] is None else json.loads(event["after"])
        if op in "cud":
            position = (event["position"]["lsn"], event["position"]["transaction"])
            if self.transactions.setdefault(position, self.batch) != self.batch:
                self.faults.append(f"{event['id']}: its transaction is split over batches")
        if op == "t":
            rows.clear()
        elif op in "cr":
            if key in rows:
                self.faults.append(f"{event['id']} {op} {key}: there is a row already")
            rows[key] = after
        elif key not in rows:
            self.faults.append(f"{event['id']} {op} {key}: there is no row")
            if op == "u":
                rows[key] = after
        else:
            # The event has the whole old row, or only its key.
            by_key = before is not None and before.keys() == json.loads(key).keys()
            current = {name: rows[key].get(name) for name in before} if by_key else rows[key]
            if before is not None and not _agree(before, current):
                self.faults.append(f"{event['id']} {op} {key}: before is {before}, and the row is {rows[key]}")
            if op == "d":
                del rows[key]
            else:
                rows[key] = {**rows[key], **after}  # what was not sent has not changed

    def compare(self, table: str, rows: Iterable[Row], key: tuple[str, ...]) -> None:
        def text(row: Row) -> str:
            return json.dumps({name: row[name] for name in key}, ensure_ascii=False, separators=(",", ":"))

        expected = {text(row): row for row in rows}
        differences = self.tables.get(table, {})
        for missing in expected.keys() - differences.keys():
            self.faults.append(f"{table} {missing} is in the table and not in the stream")
        for extra in differences.keys() - expected.keys():
            self.faults.append(f"{table} {extra} is in the stream and not in the table")
        for both in expected.keys() & differences.keys():
            if not _agree(expected[both], differences[both]):
                self.faults.append(f"{table} {both}: the table has {expected[both]}, the stream {differences[both]}")

    def verdict(self) -> list[str]:
        twice = [f"{identity} came {count} times" for identity, count in self.ids.items() if count > 1]
        return self.faults + twice


def _agree(left: Row, right: Row) -> bool:
    """In every column of both."""
    alone = left.keys() ^ right.keys()
    return alone <= COMES_AND_GOES and all(left[name] == right[name] for name in left.keys() & right.keys())
