"""The interface of the Haxe stream broker (IStreamBroker) over a blocking broker, for programs that migrate.

Method names, argument order and defaults are those of the Haxe interface. ``docs/how-to/from-haxe.md`` lists where the
behaviour differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.broker import BlockingBroker
from millstream.model import TrimPolicy, from_json_fields, to_json_fields

__all__ = ["ConsumerGroupInfo", "ConsumerInfo", "StreamBroker", "StreamMessage"]

PENDING_PAGE_SIZE = 100


class StreamMessage(NamedTuple):
    """One message. ``data`` is empty if the entry was deleted while it was pending."""

    id: str
    data: dict[str, Any]


class ConsumerInfo(NamedTuple):
    """One consumer. ``lastActivity`` is the server's time of its last activity, in milliseconds since 1970."""

    name: str
    pending: int
    lastActivity: float


class ConsumerGroupInfo(NamedTuple):
    """One consumer group of a stream."""

    name: str
    lastDeliveredId: str
    totalPending: int
    consumers: list[ConsumerInfo]


class StreamBroker:
    """``StreamBroker(open_blocking_broker(url))``: the methods of the Haxe interface on Redis or ``local://``."""

    def __init__(self, broker: BlockingBroker) -> None:
        self._broker = broker

    def xadd(self, stream: str, data: Mapping[str, Any]) -> str:
        """Adds a message and returns its id."""
        return str(self._broker.xadd(stream, to_json_fields(data)))

    def createGroup(self, stream: str, group: str, startId: str = "$") -> None:
        """Creates a consumer group. An existing group keeps its position."""
        self._broker.create_group(stream, group, start=startId)

    def deleteGroup(self, stream: str, group: str) -> None:
        """Deletes a consumer group and its pending entries."""
        self._broker.delete_group(stream, group)

    def deleteConsumer(self, stream: str, group: str, consumer: str) -> int:
        """Deletes a consumer with its pending entries, and returns how many it had."""
        return self._broker.delete_consumer(stream, group, consumer, discard=True)

    def xreadgroup(
        self, group: str, consumer: str, stream: str, count: int = 1, blockMs: int | None = None
    ) -> list[StreamMessage]:
        """Reads new messages. ``blockMs``: 0 returns at once, None waits without limit."""
        # Redis and BlockingBroker use the opposite meaning: None returns at once, 0 waits without limit.
        block_ms = 0 if blockMs is None else blockMs or None
        deliveries = self._broker.xreadgroup(stream, group, consumer, count=count, block_ms=block_ms)
        return [StreamMessage(str(delivery.id), delivery.values()) for delivery in deliveries]

    def xack(self, stream: str, group: str, messageIds: Sequence[str]) -> int:
        """Acknowledges messages, and returns how many were pending."""
        return self._broker.xack(stream, group, messageIds) if messageIds else 0

    def xpending(self, stream: str, group: str, consumer: str | None = None) -> list[StreamMessage]:
        """All pending messages of the group, or of one consumer."""
        messages: list[StreamMessage] = []
        start = "-"
        while True:
            page = self._broker.xpending_range(
                stream, group, start=start, count=PENDING_PAGE_SIZE, consumer=consumer, with_entries=True
            )
            messages += [StreamMessage(str(entry.id), from_json_fields(entry.fields or {})) for entry in page]
            if len(page) < PENDING_PAGE_SIZE:
                return messages
            start = f"({page[-1].id}"

    def xautoclaim(self, stream: str, group: str, consumer: str, minIdleMs: int, count: int = 1) -> list[StreamMessage]:
        """Claims up to ``count`` messages that have been pending for ``minIdleMs`` or longer."""
        messages: list[StreamMessage] = []
        cursor = "0-0"
        # One XAUTOCLAIM examines a limited number of pending entries, so the scan continues until its cursor is 0-0.
        while len(messages) < count:
            claimed = self._broker.xautoclaim(
                stream, group, consumer, min_idle_ms=minIdleMs, start=cursor, count=count - len(messages)
            )
            messages += [StreamMessage(str(delivery.id), delivery.values()) for delivery in claimed.deliveries]
            cursor = str(claimed.cursor)
            if cursor == "0-0":
                break
        return messages

    def xlen(self, stream: str) -> int:
        """The number of messages in a stream."""
        return self._broker.xlen(stream)

    def xtrim(self, stream: str, maxLen: int) -> int:
        """Keeps the newest ``maxLen`` messages, and returns how many were removed."""
        return self._broker.xtrim(stream, TrimPolicy(max_len=maxLen))

    def getGroupInfo(self, stream: str) -> list[ConsumerGroupInfo]:
        """The consumer groups of a stream with their consumers."""
        now_ms = self._broker.server_time_ms()
        return [
            ConsumerGroupInfo(
                group.name,
                str(group.last_delivered),
                group.pending,
                [
                    ConsumerInfo(consumer.name, consumer.pending, float(now_ms - consumer.idle_ms))
                    for consumer in group.consumers
                ],
            )
            for group in self._broker.group_info(stream)
        ]
