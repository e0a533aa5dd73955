"""Who produced, started, did and buried what: counted from the streams and the workers' books, from nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millstream.broker import BlockingBroker, beside
from millstream.demo.stage import results, topics
from millstream.model import Entry, EntryId

PAGE = 1000


class Ledger(NamedTuple):
    """``lost``: in a stream, neither done nor buried. ``duplicates``: one event stored, or one message done, twice."""

    produced: int
    handled: int
    buried: int
    lost: int
    duplicates: int
    handled_by: dict[str, int]
    started_again: int
    """Messages of which some worker had begun, and another one began anew: what was taken over, or tried again."""

    def line(self) -> str:
        """For programs: the demo's last line."""
        return (
            f"LEDGER produced={self.produced} handled={self.handled} buried={self.buried} "
            f"lost={self.lost} duplicates={self.duplicates}"
        )


def count(broker: BlockingBroker, tag: str, books: list[Path]) -> Ledger:
    produced: list[str] = []
    events: list[bytes] = []
    buried: set[str] = set()
    for topic in topics(tag):
        for entry in _all(broker, topic):
            produced.append(f"{topic} {entry.id}")
            events.append(entry.fields.get(b"id", b""))
        for letter in _all(broker, beside(topic, "dlq")):
            buried.add(f"{topic} {letter.fields[b'dlq.original_id'].decode()}")
    done = [json.loads(entry.fields[b"payload"]) for entry in _all(broker, results(tag))]
    sources = Counter(item["source"] for item in done)
    starts = Counter(
        line.rsplit(" ", 1)[0] for book in books if book.exists() for line in book.read_text().splitlines()
    )
    return Ledger(
        produced=len(produced),
        handled=len(sources),
        buried=len(buried),
        lost=len(set(produced) - set(sources) - buried),
        duplicates=len(events) - len(set(events)) + sources.total() - len(sources),
        handled_by=dict(Counter(item["worker"] for item in done)),
        started_again=sum(1 for number in starts.values() if number > 1),
    )


def _all(broker: BlockingBroker, stream: str | bytes) -> Iterator[Entry]:
    after = EntryId(0, 0)
    while page := broker.xrange(stream, f"({after}", "+", count=PAGE):
        yield from page
        after = page[-1].id
