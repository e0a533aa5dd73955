"""Recovers entries that are pending for this consumer and not in flight here: after a start, or after a failed read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

from millstream.broker.scripts import recovery
from millstream.errors import MillstreamError
from millstream.messaging.consumer.claims import Claims, scan_size
from millstream.messaging.consumer.topic import Topic
from millstream.wire import Operation

FIRST = b"0-0"


class _Scan:
    """One pass over the pending list, page by page. A new pass is a new object, so that a late page of an earlier pass
    is not taken for one of this pass."""

    __slots__ = ("cursor",)

    def __init__(self) -> None:
        self.cursor = FIRST


class OwnEntries:
    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._scans: dict[Topic, _Scan] = {}
        """Topics that may have such entries."""

    def restart(self, topic: Topic) -> None:
        """Starts a new scan, because entries may be pending for this consumer that no read returned."""
        if not topic.ended:
            self._scans[topic] = _Scan()

    def forget(self, topic: Topic) -> None:
        self._scans.pop(topic, None)

    def may_exist(self, topic: Topic) -> bool:
        return topic in self._scans

    def must_come_first(self, topic: Topic) -> bool:
        """Whether own pending entries must be recovered before new ones are read: with order per key they are older."""
        return topic in self._scans and topic.in_flight.keeps_order

    async def recover(self, topics: Iterable[Topic]) -> list[tuple[Topic, MillstreamError, int]]:
        """Called between two reads: an entry of a read in progress would look like one that needs recovery.

        Page by page until all are examined, or capacity ends; then the next call continues. Returns the topics that
        failed, each with its error and the group's incarnation before the request.
        """
        failed = []
        shares = self._shares(topics)
        while shares:
            asked_at = time.monotonic()
            scans = {topic: self._scans[topic] for topic in shares}
            unfinished = []
            with self._claims.reserve(shares):
                for topic, swept, incarnation in await self._claims.request(shares, partial(self._page, shares)):
                    if isinstance(swept, MillstreamError):
                        failed.append((topic, swept, incarnation))
                        continue
                    scan = scans[topic]
                    scan.cursor = swept.cursor
                    if swept.finished and self._scans.get(topic) is scan:
                        del self._scans[topic]
                    await self._claims.accept(topic, swept, asked_at)
                    unfinished.append(topic)
            shares = self._shares(unfinished)
        return failed

    def _shares(self, topics: Iterable[Topic]) -> dict[Topic, int]:
        return self._claims.shares({topic: topic.capacity.for_claim() for topic in topics if topic in self._scans})

    def _page(self, shares: Mapping[Topic, int], topic: Topic) -> Operation[recovery.Swept]:
        return topic.operation(
            recovery.sweep,
            min_idle_ms=0,
            cursor=self._scans[topic].cursor,
            scan=scan_size(shares[topic]),
            room=shares[topic],
            max_bytes=self._claims.max_bytes(topic, shares),
            owner=topic.consumer,
            but=topic.in_flight.ids(),
        )
