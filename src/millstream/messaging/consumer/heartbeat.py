"""Heartbeats keep in-flight entries owned, and verify the ownership of entries after a pause.

A heartbeat never takes an entry back from another consumer: it is accepted only for entries that this consumer still
owns at the delivery count it knows. Entries that another consumer has claimed are not started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline
from millstream.broker.scripts import settle
from millstream.broker.scripts.settle import Settled
from millstream.errors import MillstreamError
from millstream.messaging.consumer.in_flight import State, ids_by_counts
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.message import Message
from millstream.model import EntryId, monotonic_ms
from millstream.wire import Operation

log = logging.getLogger(__name__)

VERIFY_AGAIN_MS = 100.0
"""Pause between two ownership checks of unverified entries, and after a failed heartbeat. The broker has already
retried the request by then."""
MAX_TOPICS_PER_PIPELINE = 200
"""Topics whose heartbeats share a command pipeline."""


class Heartbeat:
    def __init__(
        self, broker: BrokerProtocol, membership: Membership, released: Callable[[Topic, Sequence[EntryId]], Any]
    ) -> None:
        """``released``: called when entries have left the in-flight table, so that later ones may start."""
        self.broker = broker
        self._membership = membership
        self._released = released
        self._wake = asyncio.Event()
        self._due_ms: dict[Topic, float] = {}
        """When the next heartbeat of each topic is due."""
        self._stuck: set[Topic] = set()
        """Topics that were reported as stuck: all their capacity is used by messages that were returned."""

    def add(self, topic: Topic) -> None:
        self._due_ms[topic] = monotonic_ms() + topic.settings.heartbeat_ms
        self._wake.set()  # its heartbeats may have to be more frequent than those of all other topics

    def stop(self, topic: Topic) -> None:
        """Ends the heartbeats of a topic. They would keep other consumers from claiming entries that were returned."""
        self._due_ms.pop(topic, None)
        self._stuck.discard(topic)

    def topics(self) -> set[Topic]:
        """The topics whose entries are kept owned. Also called by the thread of a blocked loop."""
        return set(self._due_ms)

    def verify(self, topic: Topic) -> None:
        """Sends a heartbeat as soon as possible, because another consumer may have claimed unverified entries."""
        self._set_due(topic, 0.0)
        self._wake.set()

    def _set_due(self, topic: Topic, due_ms: float) -> None:
        if topic in self._due_ms:
            self._due_ms[topic] = due_ms

    async def run(self) -> None:
        while True:
            self._wake.clear()
            due_ms = self._due_ms
            # Half of the heartbeat interval, so that the arrival time of an entry need not be known.
            tick_ms = min((topic.settings.heartbeat_ms for topic in due_ms), default=1_000) / 2
            now = monotonic_ms()
            due = [topic for topic, at_ms in due_ms.items() if topic.in_flight and at_ms <= now + tick_ms / 2]
            for topic in due:
                due_ms[topic] = now + topic.settings.heartbeat_ms
            for at in range(0, len(due), MAX_TOPICS_PER_PIPELINE):
                await self.send([topic for topic in due[at : at + MAX_TOPICS_PER_PIPELINE] if topic in due_ms])
            now = monotonic_ms()
            # ``verify`` and ``_failed`` set an earlier time for unverified entries and after failures.
            next_ms = min((due_ms[topic] for topic in due if topic in due_ms), default=now + tick_ms)
            try:
                async with asyncio.timeout(max(1.0, min(tick_ms, next_ms - now)) / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def send(self, topics: Sequence[Topic]) -> None:
        returns = self._return_expired(topics)
        sent: list[tuple[Topic, int, list[EntryId], int]] = [
            (topic, times, ids, self._membership.incarnation(topic))
            for topic in topics
            for times, ids in topic.in_flight.heartbeat_ids().items()
        ]
        asked_at = time.monotonic()
        heartbeats = [topic.operation(settle.heartbeat, ids, times_delivered=times) for topic, times, ids, _ in sent]
        replies = await self.broker.run(command_pipeline, [*returns, *heartbeats])
        for (topic, times, ids, incarnation), reply in zip(sent, replies[len(returns) :], strict=True):
            try:
                if isinstance(reply, MillstreamError):
                    raise reply
                await self._process_reply(topic, times, ids, reply, incarnation, asked_at)
            except MillstreamError as error:
                # The error concerns one topic. The replies for the other topics are still processed.
                await self._failed(topic, error, incarnation)
        now = time.monotonic()
        for topic in topics:
            if topic.lease_is_certain(now):
                topic.in_flight.requeue_verified(now)
            if topic.in_flight.unverified:
                self._set_due(topic, monotonic_ms() + VERIFY_AGAIN_MS)
            if topic.in_flight.ready:
                topic.wake_workers()

    async def _process_reply(
        self, topic: Topic, times: int, ids: Sequence[EntryId], reply: Settled, incarnation: int, asked_at: float
    ) -> None:
        topic.report_gone(reply.gone)
        # Between the request and its reply an entry may have been settled or counted.
        refused = set(reply.refused)
        lost = topic.in_flight.can_be_lost(refused, times)
        if lost:
            log.warning(
                "%d pending entries of %s were claimed by another consumer; this process was probably paused for "
                "longer than claim_min_idle_ms",
                *(len(lost), topic.name),
            )
            topic.emit("messaging.lost", entries=len(lost))
            await self._membership.process_refusal(topic, reply, incarnation)
            lost = topic.in_flight.can_be_lost(lost, times)
            await self._membership.detect_shared_name(topic, lost, times)
            topic.in_flight.mark_lost(topic.in_flight.can_be_lost(lost, times))
            self._released(topic, ())
        topic.in_flight.confirm(topic.valid_until(asked_at), (entry_id for entry_id in ids if entry_id not in refused))
        topic.in_flight.mark_gone(reply.gone)

    async def _failed(self, topic: Topic, error: MillstreamError, incarnation: int) -> None:
        self._set_due(topic, monotonic_ms() + VERIFY_AGAIN_MS)
        if (remaining := await self._membership.recovered_from(topic, error, incarnation)) is not None:
            topic.emit("messaging.keeping_failed", error=str(remaining))

    # --- entries whose handler does not end ---------------------------------------------------------------------------

    def _return_expired(self, topics: Iterable[Topic]) -> list[Operation[Settled]]:
        """Operations that return expired entries, so that any consumer may claim them at once. If one fails, they can
        be claimed after claim_min_idle_ms. This process does not claim them: a second handler would wait for the same
        thing as the first one."""
        operations = []
        now = monotonic_ms()
        for topic in topics:
            max_hold_ms = topic.settings.max_hold_ms
            if max_hold_ms is None:
                continue
            # Repeated: a heartbeat of the thread for blocked loops may arrive after the entry was returned.
            returned = topic.in_flight.return_counts(State.EXPIRED)
            late = topic.in_flight.expire(now, max_hold_ms)
            for (times, return_count), ids in ids_by_counts([*returned, *late]).items():
                operations.append(
                    topic.operation(settle.return_unstarted, ids, times_delivered=times, leaving=return_count)
                )
            if late:
                self._released(topic, ())  # unstarted ones have left: later entries of their keys may start
            self._report_expired(topic, [message for message, _ in late])
        return operations

    def _report_expired(self, topic: Topic, messages: Sequence[Message]) -> None:
        """Reports messages without an outcome after max_hold_ms, and once a topic that is full of them."""
        if messages:
            log.warning(
                "returned %d messages of %s, the oldest of them %s: no handler settled them within max_hold_ms (%s)",
                *(len(messages), topic.name, messages[0].id, topic.settings.max_hold_ms),
            )
            topic.emit("messaging.hold_expired", entries=len(messages))
        if not topic.in_flight.stuck:
            self._stuck.discard(topic)
        elif topic not in self._stuck:
            self._stuck.add(topic)
            log.warning(
                "%s is not read any more: all %d messages that group %s may have in flight here were returned, and "
                "their handlers have not ended. Find what they wait for, or restart this process",
                *(topic.name, len(topic.in_flight), topic.group),
            )
            topic.emit("messaging.stuck", entries=len(topic.in_flight))
