"""A partitioned topic as a router reads it: one member for each process and group, which owns some of the partitions.

Every group has owners of its own. What is leased is therefore not the partition's stream but ``<stream>.for:<group>``
beside it, a name that holds nothing; its token fences what is done on the stream, because they share a slot.
"""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from millstream.assignment.announcement import balancer_stream
from millstream.assignment.partitions import announce_streams
from millstream.assignment.settings import Settings
from millstream.assignment.subscriber import AssignedSubscriber
from millstream.broker import Broker, BrokerProtocol, beside
from millstream.errors import InvalidArgument
from millstream.messaging import Handler, OutputTopic, Subscriber, partition_streams
from millstream.model import EntryId

SETTINGS = Settings(go_locks=False)


class PartitionedSubscriber:
    """Looks to a router like a Subscriber: ``consume`` until ``close``."""

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        topic: str,
        partitions: int,
        group: str,
        settings: Settings = SETTINGS,
        **options: Any,
    ) -> None:
        if not isinstance(broker, Broker):
            raise InvalidArgument("broker", broker, "one that open_broker made: owners of partitions need all of it")
        self._broker = broker
        self._topic = topic
        self._group = group
        self._service = f"{topic}.{group}"
        self._leased = {
            beside(stream, f"for:{group}").decode("utf-8", "surrogateescape"): stream
            for stream in partition_streams(topic, partitions)
        }
        self._member = options.pop("consumer", None)
        self._options = options
        self._settings = settings
        self.settings = Subscriber(broker, group=group, consumer=self._member, **options).settings
        self._running: AssignedSubscriber | None = None
        self._has_read = False
        self._closed = False

    @property
    def streams(self) -> list[str]:
        """The partitions that this process owns and reads now."""
        return sorted(self._leased[one] for one in self._running.streams) if self._running is not None else []

    @property
    def ready(self) -> bool:
        return not self._closed and self._running is not None and self._running.ready

    @property
    def has_read(self) -> bool:
        """Whether the member ever joined: then what ended it may be mended, for it did work once."""
        return self._has_read or (self._running is not None and self._running.client.joined)

    async def consume(
        self, topic: str, handler: Handler, *, publish_to: OutputTopic | None = None, start: str | EntryId | None = None
    ) -> None:
        """Runs the handler on every message of the partitions that come to this process, in the order of their keys."""
        assert (topic, start) == (self._topic, None)
        if self._closed:
            return
        await announce_streams(self._broker, balancer_stream(self._service), self._leased, {"topic": topic})
        self._running = AssignedSubscriber(
            self._broker,
            self._service,
            handler,
            group=self._group,
            publish_to=publish_to,
            # Never the pod's name alone, nor the process's: under one name, two routers would take each other's leases.
            member=self._member or f"{self.settings.consumer}-{token_hex(4)}",
            settings=self._settings,
            leased=self._leased,
            **{"ordered_by_key": True, **self._options},
        )
        try:
            await self._running.run()
        finally:
            self._has_read = self.has_read

    async def close(self, timeout_ms: int | None = None) -> None:
        """Finishes what is in flight, up to ``timeout_ms``, hands back the rest, and then the partitions."""
        self._closed = True
        if self._running is not None:
            await self._running.close(self.settings.close_timeout_ms if timeout_ms is None else timeout_ms)
