"""Subscribers on the streams that a member owns, each fenced by the token of its stream.

Only the owner reads a stream. So a new owner claims entries that are pending for previous owners at once, without
waiting until they are idle.

A router reads a partitioned topic through one member per process and group, which owns some of the partitions. Each
group has its own owners. Therefore the lease is not on the stream of the partition, but on the companion key
``<stream>.for:<group>``, which has no value. Its token fences operations on the stream, because they share a slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from millstream.assignment.announcement import balancer_stream, route_service
from millstream.assignment.client import AssignmentClient
from millstream.assignment.leases import FencingToken
from millstream.assignment.membership import Settings
from millstream.assignment.notifications import StreamAdded, StreamDisowned, StreamTerminated
from millstream.assignment.partitions import announce_streams
from millstream.broker import Broker, BrokerProtocol, command_pipeline, companion_key
from millstream.broker.drivers import PipelineBatcher
from millstream.broker.operations.groups import take_over_consumers
from millstream.errors import InvalidArgument, MillstreamError, StaleOwner
from millstream.messaging import Handler, Subscriber, partition_streams
from millstream.messaging.consumer.subscription import LAST_REPLY_S
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.supervision import is_open, keep_running
from millstream.model import EntryId, Observer
from millstream.wire import Operation

log = logging.getLogger(__name__)

PARTITION_SETTINGS = Settings(go_locks=False)
INHERIT_AFTER_S = (1.0, 3.0)
"""When pending entries of previous owners are claimed again after a stream was taken; and once more when their longest
read must have returned."""
MAX_STREAMS_PER_PIPELINE = 500
"""Streams for which one command pipeline claims the entries of previous owners."""


class OwnedStream(NamedTuple):
    """A stream that is read through a fenced broker."""

    name: str
    token: FencingToken
    broker: Broker
    subscriber: Subscriber


class AssignedSubscriber:
    """Handles every message of every stream that this member owns. ``run()`` until ``close()``.

    Options of Subscriber may be given under their names (``max_in_flight``, ``max_deliveries``, ``codec``, ...).
    """

    def __init__(
        self,
        broker: Broker,
        service: str,
        handler: Handler,
        *,
        group: str,
        publish_to: OutputTopic | None = None,
        member: str | None = None,
        settings: Settings | None = None,
        observer: Observer | None = None,
        leased: Mapping[str, str] | None = None,
        info: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """``leased``: the leased names, if they differ from the names of the streams, and the stream of each. No other
        lease of the service is taken. ``info`` is stored in the announcements."""
        self._broker = broker
        self._service = service
        self._handler = handler
        self._group = group
        self._leased = leased or {}
        self._expected: Collection[str] = self._leased
        """Streams that this subscriber announces, and announces again if their announcements are lost."""
        self._info = info or {}
        self._unexpected: set[str] = set()
        """Announced streams that belong to another service: this member must not own them."""
        self._announcements_seen: tuple[int, EntryId | None] | None = None
        self._publish_to = publish_to
        self._draining = False
        self._closing = asyncio.Event()
        self._options = {"group_start": "0", **options}
        # Validates the options now, not when the first stream is taken.
        Subscriber(broker, group=group, consumer="check", **self._options)
        self.client = AssignmentClient(
            broker,
            service,
            member=member,
            settings=settings,
            observer=observer,
            before_release=self._stop_many,
            choose_releases=self._choose_releases,
            accepts=self._leased.__contains__ if self._leased else None,
        )
        self._running: dict[str, tuple[OwnedStream, asyncio.Task[None]]] = {}
        """By leased name."""
        self._handing_over: dict[str, asyncio.Task[None]] = {}
        """Streams that are released as soon as their running handlers have ended. Nothing new starts there."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Tasks that end the reading of lost streams, concurrently, because one may wait for a handler. A stream that
        is taken again meanwhile is read after its task."""
        self._inheriting = PipelineBatcher(broker)
        self._inherit_at: dict[str, list[float]] = {}
        """Streams that were taken recently, and when to claim entries that a late read of a previous owner received."""
        self._released: dict[str, FencingToken] = {}
        """The last token of each released stream, until its notification arrives: an older StreamAdded that is still in
        the queue must not start the reading."""

    @property
    def streams(self) -> list[str]:
        """The streams that are being read now."""
        return sorted(self._running)

    @property
    def ready(self) -> bool:
        return (
            self.client.ready
            and not self._unexpected
            and not self._malformed
            and all(owned.subscriber.ready for owned, _ in self._reading())
        )

    def _reading(self) -> Iterator[tuple[OwnedStream, asyncio.Task[None]]]:
        return (running for stream, running in self._running.items() if stream not in self._handing_over)

    @property
    def readiness(self) -> dict[str, bool]:
        """The member, and each stream that it owns: whether it is being read."""
        streams = {owned.token.stream: owned.subscriber.ready for owned, _ in self._reading()}
        member_ready = self.client.ready and not self._unexpected
        malformed = dict.fromkeys(self._malformed, False)
        return {f"member {self.client.id}": member_ready, **streams, **malformed}

    @property
    def _malformed(self) -> list[str]:
        """Streams of this service that no member can own, by stream name."""
        announced = self.client.malformed
        return (
            sorted(self._leased[name] for name in announced & self._leased.keys())
            if self._leased
            else sorted(announced)
        )

    async def run(self) -> None:
        """Runs until ``close``. A stream that cannot be read is released, so that another member tries.

        Returns at once if ``close`` was called before."""
        helpers = [self._start_helper(self._keep_inheriting, "take-over")]
        try:
            if self._expected:
                await self._announce_first()
                helpers.append(self._start_helper(self._keep_checking_announcements, "announcer"))
            if not self._closing.is_set():
                await self._follow()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)  # cancelled, or ended because the broker is closed
            if self._ending:
                await asyncio.wait(self._ending.values())

    def _start_helper(self, part: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        running = keep_running(part, name, self._broker.context.observer, repeats=is_open)
        return asyncio.create_task(running, name=f"millstream {name}")

    async def _follow(self) -> None:
        async for event in self.client.start():
            if isinstance(event, StreamAdded) and event.token is not None:
                released = self._released.get(event.stream)
                if released is None or event.token.number > released.number:
                    self._start(event.token, event.taken_from)
            elif isinstance(event, (StreamDisowned, StreamTerminated)):
                self._handing_over.pop(event.stream, None)
                if event.stream in self._running:
                    ending = asyncio.create_task(self._stop(*self._running.pop(event.stream), timeout_ms=0))
                    self._ending[event.stream] = ending
                    ending.add_done_callback(partial(self._ended, event.stream))
                if self._released.get(event.stream) == event.token:
                    del self._released[event.stream]

    async def _announce_first(self) -> None:
        """Checks the announcements once. ``close`` ends the check, because the server may be unreachable."""
        checking = asyncio.create_task(self._check_announcements(), name="millstream announcer")
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait([checking, closing], return_when=asyncio.FIRST_COMPLETED)
            if not checking.done():
                checking.cancel()
                await asyncio.wait([checking], timeout=LAST_REPLY_S)
        finally:
            checking.cancel()
            closing.cancel()
        if checking.done() and not checking.cancelled():
            checking.result()

    async def _keep_checking_announcements(self) -> None:
        while True:
            await asyncio.sleep(self.client.settings.renew_interval_ms / 1000)
            await self._check_announcements()

    async def _check_announcements(self) -> None:
        """Announces streams whose announcements are lost, and notices announcements of another service's streams.

        Reads all announcements only after a change: adding one changes the last id, removing one changes the length.
        """
        balancer = balancer_stream(self._service)
        last = await self._broker.xrevrange(balancer, count=1)
        fingerprint = (await self._broker.xlen(balancer), last[0].id if last else None)
        if fingerprint == self._announcements_seen:
            return
        announced = await announce_streams(self._broker, balancer, self._expected, self._info)
        unexpected = announced - self._leased.keys() if self._leased else set()
        if unexpected - self._unexpected:
            log.error(
                "service %r: %d announced streams do not belong to it, such as %r. This member does not take them and "
                "is not ready. Find what announced them, then delete their entries from stream %r.",
                *(self._service, len(unexpected), min(unexpected), balancer),
            )
        self._unexpected = unexpected
        # Missing streams that a living owner has yet to announce again must be checked again.
        self._announcements_seen = fingerprint if announced.issuperset(self._expected) else None

    async def close(self, timeout_ms: int | None = None) -> None:
        """Finishes messages in flight, returns the others, and releases the streams, so that no lease has to expire.

        Handlers may take ``timeout_ms``, while the leases are renewed; without it, half a lease. If the server cannot
        be reached, this does not wait long, and the streams are free when their leases expire.
        """
        self._closing.set()
        if timeout_ms is not None:
            self._draining = True
            # Each stream is released when its handlers have ended: a long handler delays no other stream.
            self.client.retire()
            handing_over = [self._hand_over(stream, timeout_ms) for stream in self._running]
            await asyncio.gather(*handing_over, return_exceptions=True)
        await self.client.close()

    def _start(self, token: FencingToken, taken_from: str | None) -> None:
        if self._draining:
            return  # the stream is about to be released
        # A stream that is taken from a dead owner had a group. If the group is missing, it was deleted, and the
        # unfinished entries are unknown: everything is read again. ``group_start`` is for a stream without a previous
        # owner.
        options = {**self._options, "group_start": "0"} if taken_from else self._options
        fenced = self._broker.fenced(token)
        subscriber = Subscriber(fenced, group=self._group, consumer=self.client.id, **options)
        subscriber.begin_only_until(lambda: self.client.certain_until(token))
        owned = OwnedStream(self._leased.get(token.stream, token.stream), token, fenced, subscriber)
        task = asyncio.create_task(self._consume(owned, self._ending.get(token.stream)))
        self._running[token.stream] = (owned, task)
        now, longest_s = time.monotonic(), subscriber.settings.read_block_ms / 1000 + INHERIT_AFTER_S[0]
        self._inherit_at[token.stream] = [now + after_s for after_s in (*INHERIT_AFTER_S, longest_s)]

    async def _consume(self, owned: OwnedStream, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:
                await asyncio.wait([previous])
            await self._inheriting.run(self._inherit(owned))
            await owned.subscriber.consume(owned.name, self._handler, publish_to=self._publish_to)
        except Exception as error:  # after any error: otherwise the stream would be owned and never read
            if self.client.owned.get(owned.token.stream) == owned.token:
                await self._give_up(owned.token, error)
        finally:
            self._report_unsubscribed(owned)

    def _report_unsubscribed(self, owned: OwnedStream) -> None:
        """Emits the event, unless the stream was taken again meanwhile and is being read."""
        running = self._running.get(owned.token.stream)
        if running is None or running[0] is owned:
            self._broker.context.observer(
                "assignment.unsubscribed",
                service=self._service,
                member=self.client.id,
                topic=owned.name,
                group=self._group,
                consumer=self.client.id,
            )

    async def _give_up(self, token: FencingToken, error: Exception) -> None:
        if isinstance(error, StaleOwner):
            log.info("%r has a new owner", token.stream)
        else:
            log.error("cannot read %r, releasing it", token.stream, exc_info=error)
        # Not at once: if there is no other member, this member takes it again.
        await asyncio.sleep(self.client.settings.renew_interval_ms / 1000)
        running = self._running.get(token.stream)
        if running is None or running[0].token != token or self.client.owned.get(token.stream) != token:
            return  # it was lost or taken again meanwhile: the error does not concern the current reading
        # Removed first: a release stops the tasks of running streams, and would wait for this task.
        self._running.pop(token.stream, None)
        try:
            await self.client.release(token.stream)
        except MillstreamError as release_error:
            log.info("%r was not released: %s", token.stream, release_error)

    def _inherit(self, owned: OwnedStream) -> Operation[int]:
        """Claims pending entries of previous owners, with their delivery counts, and deletes their consumers. Fenced: a
        member that was paused past its lease must not claim entries that the new owner handles."""
        return take_over_consumers(owned.broker.context, owned.name, self._group, self.client.id)

    async def _keep_inheriting(self) -> None:
        """Claims entries that late reads of previous owners receive, without waiting until they are idle.

        XREADGROUP is not fenced: a read that a previous owner has sent can receive entries as long as it blocks.
        """
        while True:
            await asyncio.sleep(INHERIT_AFTER_S[0] / 2)
            now = time.monotonic()
            self._inherit_at = {
                stream: times for stream, times in self._inherit_at.items() if times and stream in self._running
            }
            due = [stream for stream, times in self._inherit_at.items() if times[0] <= now]
            for at in range(0, len(due), MAX_STREAMS_PER_PIPELINE):
                batch = [stream for stream in due[at : at + MAX_STREAMS_PER_PIPELINE] if stream in self._running]
                await self._inherit_again(batch)

    async def _inherit_again(self, streams: Sequence[str]) -> None:
        running = [self._running[stream][0] for stream in streams]
        replies = await self._broker.run(command_pipeline, [self._inherit(owned) for owned in running])
        for stream, owned, moved in zip(streams, running, replies, strict=True):
            if isinstance(moved, int) and self._inherit_at.get(stream):  # an error is tried again
                self._inherit_at[stream].pop(0)
                if moved:
                    owned.subscriber.look_again()

    def _choose_releases(self, streams: Sequence[str], excess: int) -> Sequence[str]:
        """Streams without a running handler first. The others are released when their handlers have ended, or after
        ``close_timeout_ms``: to move a stream must not cost a message its work and a delivery."""
        unused = [stream for stream, ending in self._handing_over.items() if ending.done() and stream in streams]
        further = excess - len(self._handing_over)
        if further > 0:
            others = [stream for stream in reversed(streams) if stream not in self._handing_over]
            others.sort(key=self._is_handling)
            for stream in others[:further]:
                if self._is_handling(stream):
                    self._hand_over(stream, self._running[stream][0].subscriber.settings.close_timeout_ms)
                else:
                    unused.append(stream)
        return unused

    def _is_handling(self, stream: str) -> bool:
        running = self._running.get(stream)
        return running is not None and running[0].subscriber.handling

    def _hand_over(self, stream: str, timeout_ms: int) -> asyncio.Task[None]:
        """Starts nothing new on the stream, and releases it when its running handlers have ended."""
        closing = asyncio.create_task(
            self._running[stream][0].subscriber.close(timeout_ms), name=f"millstream hand-over of {stream}"
        )
        closing.add_done_callback(lambda _: self.client.hand_over_soon())
        self._handing_over[stream] = closing
        return closing

    async def _stop_many(self, streams: Sequence[str]) -> None:
        """Called before leases are released: messages in flight can be acknowledged until then."""
        timeout_ms, owned = self.client.settings.lease_ms // 2, self.client.owned
        self._released |= {stream: owned[stream] for stream in streams if stream in owned}
        running = [self._running.pop(stream) for stream in streams if stream in self._running]
        for stream in streams:
            self._handing_over.pop(stream, None)
        await asyncio.gather(*(self._stop(owned, task, timeout_ms=timeout_ms) for owned, task in running))

    async def _stop(self, owned: OwnedStream, task: asyncio.Task[None], *, timeout_ms: int) -> None:
        await owned.subscriber.close(timeout_ms=timeout_ms)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ended(self, stream: str, ending: asyncio.Task[None]) -> None:
        if self._ending.get(stream) is ending:
            del self._ending[stream]
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("reading %r ended with an error", stream, exc_info=error)


def assigned_subscriber(broker: Broker, service: str, handler: Handler, **options: Any) -> AssignedSubscriber:
    """Handles the messages of every stream that this member of ``service`` owns. Options: see AssignedSubscriber."""
    return AssignedSubscriber(broker, service, handler, **options)


class PartitionedSubscriber:
    """Reads a partitioned topic for a router, with the interface of a Subscriber: ``consume`` until ``close``."""

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        topic: str,
        partitions: int,
        group: str,
        settings: Settings = PARTITION_SETTINGS,
        **options: Any,
    ) -> None:
        if not isinstance(broker, Broker):
            raise InvalidArgument(
                "broker", broker, "a broker from open_broker: owners of partitions need its whole interface"
            )
        self._broker = broker
        self._topic = topic
        self._group = group
        self._service = route_service(topic, group)
        self._leased = {
            companion_key(stream, f"for:{group}").decode("utf-8", "surrogateescape"): stream
            for stream in partition_streams(topic, partitions)
        }
        consumer = options.pop("consumer", None)
        self._options = options
        self._settings = settings
        self.settings = Subscriber(broker, group=group, consumer=consumer, **options).settings
        self._running: AssignedSubscriber | None = None
        self._has_read = False
        self._closed = False

    @property
    def streams(self) -> list[str]:
        """The partitions that this process owns and reads now."""
        return sorted(self._leased[name] for name in self._running.streams) if self._running is not None else []

    @property
    def ready(self) -> bool:
        return not self._closed and self._running is not None and self._running.ready

    @property
    def has_read(self) -> bool:
        """Whether the member has joined at least once: then an error that ended it may be temporary."""
        return self._has_read or (self._running is not None and self._running.client.joined)

    async def consume(
        self, topic: str, handler: Handler, *, publish_to: OutputTopic | None = None, start: str | EntryId | None = None
    ) -> None:
        """Runs the handler on every message of the partitions that this process owns, in order per key."""
        assert (topic, start) == (self._topic, None)
        if self._closed:
            return
        self._running = AssignedSubscriber(
            self._broker,
            self._service,
            handler,
            group=self._group,
            publish_to=publish_to,
            # With a random suffix: if two processes or two routers used one name, both would own every partition,
            # because a member takes streams whose owner record has its own name.
            member=f"{self.settings.consumer}-{token_hex(4)}",
            settings=self._settings,
            leased=self._leased,
            info={"topic": topic},
            **{"ordered_by_key": True, **self._options},
        )
        try:
            await self._running.run()
        finally:
            self._has_read = self.has_read

    async def close(self, timeout_ms: int | None = None) -> None:
        """Finishes messages in flight, up to ``timeout_ms``, returns the others, and releases the partitions."""
        self._closed = True
        if self._running is not None:
            await self._running.close(self.settings.close_timeout_ms if timeout_ms is None else timeout_ms)
