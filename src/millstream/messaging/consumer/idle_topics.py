"""Polled topics that need no poll now: they are read completely, and the server reports the next write to them.

A topic is idle only if its watch began before the read that returned all of its entries. So an entry is either in that
read or reported. Reports are a hint (``KeyWatch``): an idle topic is also read without one, at a bounded interval.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from millstream.broker.transport.interface import KeyWatch
from millstream.messaging.consumer.reads import TopicRead
from millstream.model import monotonic_ms

IDLE_CHECK_MS = 250.0
"""How often a shard looks for idle topics that have to be read without a report of a write."""


class IdleTopics:
    def __init__(self, watch: KeyWatch | None, wake: Callable[[], None]) -> None:
        """``watch``: None if writes are not reported; then no topic is idle. ``wake``: called when a topic is not idle
        any more because of a write."""
        self._watch = watch
        self._wake = wake
        self._read_at_ms: dict[bytes, float] = {}
        """The idle topics, and when each is read without a report."""
        self._written_in_read: set[bytes] = set()
        """Topics that were written since the read in progress began."""
        self._unreported: set[bytes] = set()
        """Topics of the read in progress that were idle until then: no write was reported."""

    def due(self, choice: dict[bytes, TopicRead]) -> dict[bytes, TopicRead]:
        """The topics that have to be read now."""
        now = monotonic_ms()
        read_at_ms = self._read_at_ms
        return {key: read for key, read in choice.items() if read_at_ms.get(key, 0.0) <= now}

    async def watch(self, keys: Iterable[bytes]) -> None:
        """Called before these topics are read: writes to them are reported from now on."""
        if self._watch is None:
            return
        keys = list(keys)
        self._unreported = {key for key in keys if self._read_at_ms.pop(key, None) is not None}
        self._written_in_read.clear()
        await self._watch.watch(keys, self._written)

    def caught_up(self, read: TopicRead) -> bool:
        """Called when a read has returned all entries of the topic. True if writes to it are reported, so that it needs
        no frequent polls."""
        key = read.topic.key
        if self._watch is None or not self._watch.covers(key):
            return key in self._written_in_read
        # Spread, so that topics that were added together are not always read together.
        interval_ms = max(IDLE_CHECK_MS, read.topic.settings.read_block_ms)
        self._read_at_ms[key] = monotonic_ms() + interval_ms * random.uniform(0.75, 1.0)  # noqa: S311 - spreads reads
        return True

    async def verify(self, returned: Iterable[bytes]) -> None:
        """Called with the topics of which a read returned entries: checks that their writes were reported."""
        missed = self._unreported.intersection(returned)
        if missed and self._watch is not None:
            await self._watch.verify(missed)

    def changed(self, key: bytes) -> None:
        """Ends the idle state of a topic, so that it is read as soon as possible."""
        self._read_at_ms.pop(key, None)

    def forget(self, key: bytes) -> None:
        self._read_at_ms.pop(key, None)
        if self._watch is not None:
            self._watch.forget(key)

    def _written(self, key: bytes) -> None:
        if self._read_at_ms.pop(key, None) is not None:
            self._wake()
        else:
            self._written_in_read.add(key)
