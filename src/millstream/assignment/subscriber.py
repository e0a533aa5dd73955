"""The join with messaging: a subscriber on every stream that this member owns, guarded by the stream's token.

In: notifications of the member. Out: handlers that ran. A stream is read by its owner alone, so whatever others left
pending on it is the new owner's at once, without waiting until it is idle.

A router reads a partitioned topic through one member for each process and group, which owns some of the partitions.
Every group has owners of its own. What is leased is therefore not the partition's stream but ``<stream>.for:<group>``
beside it, a name that holds nothing; its token fences what is done on the stream, because they share a slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from millstream.assignment.announcement import balancer_stream
from millstream.assignment.client import AssignmentClient
from millstream.assignment.leases import Token
from millstream.assignment.membership import Settings
from millstream.assignment.notifications import StreamAdded, StreamDisowned, StreamTerminated
from millstream.assignment.partitions import announce_partitions, announce_streams
from millstream.broker import Broker, BrokerProtocol, Gathering, beside, inherit_consumers, together
from millstream.errors import InvalidArgument, MillstreamError, StaleOwner
from millstream.messaging import Handler, OutputTopic, Subscriber, keep_running, partition_streams
from millstream.model import EntryId, Observer
from millstream.wire import Conversation

log = logging.getLogger(__name__)

PARTITION_SETTINGS = Settings(go_locks=False)
INHERIT_AFTER_S = (1.0, 3.0)
"""After a stream was taken; and once more when the longest read of a former owner has come back."""
IN_ONE_GO = 500
"""Streams that are asked together for what their former owners left."""


class OwnedStream(NamedTuple):
    """A stream that is read, through a broker behind its token."""

    name: str
    token: Token
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
        topic: str | None = None,
        partitions: int | None = None,
        publish_to: OutputTopic | None = None,
        member: str | None = None,
        settings: Settings | None = None,
        observer: Observer | None = None,
        leased: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """``leased``: what is announced and owned where that is not the stream's own name, and the stream of each."""
        if topic is not None:
            warnings.warn(
                "topic and partitions go with the next release: use Router.on('orders', partitions=4, ...).",
                DeprecationWarning,
                stacklevel=3,
            )
        if (topic is None) != (partitions is None):
            raise InvalidArgument("partitions", partitions, "both topic and partitions, or neither")
        self._broker = broker
        self._service = service
        self._handler = handler
        self._group = group
        self._partitioned = (topic, partitions) if topic is not None and partitions is not None else None
        self._leased = leased or {}
        self._publish_to = publish_to
        self._draining = False
        self._options = {"group_start": "0", "ordered_by_key": self._partitioned is not None, **options}
        # Everything is checked now: a wrong option must not wait for the first stream.
        Subscriber(broker, group=group, consumer="check", **self._options)
        self.client = AssignmentClient(
            broker, service, member=member, settings=settings, observer=observer, before_release=self._stop_many
        )
        self._running: dict[str, tuple[OwnedStream, asyncio.Task[None]]] = {}
        """By what is leased."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Streams that went, while their reading ends: side by side, as one may wait for a handler. One that comes back
        meanwhile is read after that."""
        self._inheriting = Gathering(broker)
        self._heirs: dict[str, list[float]] = {}
        """Streams that were taken lately, and when to look for what a former owner's read has still taken of them."""
        self._given_back: dict[str, Token] = {}
        """The last token of each stream that went back, until we are told so: an older StreamAdded, which was still
        waiting to be heard, must not start it."""

    @property
    def streams(self) -> list[str]:
        """Those that are being read now."""
        return sorted(self._running)

    @property
    def ready(self) -> bool:
        return self.client.ready and all(owned.subscriber.ready for owned, _ in self._running.values())

    @property
    def readiness(self) -> dict[str, bool]:
        """The member, and each stream that it owns: whether it is being read."""
        streams = {stream: owned.subscriber.ready for stream, (owned, _) in self._running.items()}
        return {f"member {self.client.id}": self.client.ready, **streams}

    async def run(self) -> None:
        """Until ``close``. A stream that cannot be read is released, for another member to try."""
        if self._partitioned is not None:
            await announce_partitions(self._broker, self._service, *self._partitioned)
        inheriting = asyncio.create_task(
            keep_running(self._go_on_inheriting, "heir", self._broker.context.observer), name="millstream heir"
        )
        try:
            await self._follow()
        finally:
            inheriting.cancel()
            if self._ending:
                await asyncio.wait(self._ending.values())

    async def _follow(self) -> None:
        async for one in self.client.start():
            if isinstance(one, StreamAdded) and one.token is not None:
                back = self._given_back.get(one.stream)
                if back is None or one.token.number > back.number:
                    self._start(one.token)
            elif isinstance(one, (StreamDisowned, StreamTerminated)):
                if one.stream in self._running:
                    ending = asyncio.create_task(self._stop(*self._running.pop(one.stream), patience_ms=0))
                    self._ending[one.stream] = ending
                    ending.add_done_callback(partial(self._ended, one.stream))
                if self._given_back.get(one.stream) == one.token:
                    del self._given_back[one.stream]

    async def close(self, timeout_ms: int | None = None) -> None:
        """Finishes what is in flight, hands back the rest, and then the streams: nothing has to time out.

        With ``timeout_ms`` handlers may take so long, for the leases are held meanwhile; without, half a lease.
        """
        if timeout_ms is not None:
            self._draining = True
            await asyncio.gather(*(owned.subscriber.close(timeout_ms) for owned, _ in self._running.values()))
        await self.client.close()

    def _start(self, token: Token) -> None:
        if self._draining:
            return  # it goes back in a moment
        mine = self._broker.behind(token.guard())
        subscriber = Subscriber(mine, group=self._group, consumer=self.client.id, **self._options)
        subscriber.begin_only_until(lambda: self.client.certain_until(token))
        owned = OwnedStream(self._leased.get(token.stream, token.stream), token, mine, subscriber)
        task = asyncio.create_task(self._consume(owned, self._ending.get(token.stream)))
        self._running[token.stream] = (owned, task)
        now, longest_s = time.monotonic(), subscriber.settings.read_block_ms / 1000 + INHERIT_AFTER_S[0]
        self._heirs[token.stream] = [now + after_s for after_s in (*INHERIT_AFTER_S, longest_s)]

    async def _consume(self, owned: OwnedStream, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await self._inheriting.run(self._inherit(owned))
            await owned.subscriber.consume(owned.name, self._handler, publish_to=self._publish_to)
        except Exception as error:  # whatever it was: an owned stream that nobody reads is the worst of all
            if self.client.owned.get(owned.token.stream) == owned.token:
                await self._give_up(owned.token, error)

    async def _give_up(self, token: Token, error: Exception) -> None:
        if isinstance(error, StaleOwner):
            log.info("%r is another member's by now", token.stream)
        else:
            log.error("cannot read %r, releasing it", token.stream, exc_info=error)
        # Not at once: where there is nobody else, it comes back to us.
        await asyncio.sleep(self.client.settings.renew_interval_ms / 1000)
        running = self._running.get(token.stream)
        if running is None or running[0].token != token or self.client.owned.get(token.stream) != token:
            return  # it went, or came back meanwhile: what reads it now has nothing to do with this error
        # Off the list first: releasing stops what is on it, and would wait for this very task.
        self._running.pop(token.stream, None)
        try:
            await self.client.release(token.stream)
        except MillstreamError as trouble:
            log.info("%r was not released: %s", token.stream, trouble)

    def _inherit(self, owned: OwnedStream) -> Conversation[int]:
        """Takes what former owners left pending, with their delivery counts; their names go. Behind the token: a member
        that was stopped past its lease would take from its heir what that is working on."""
        return inherit_consumers(owned.broker.context, owned.name, self._group, self.client.id)

    async def _go_on_inheriting(self) -> None:
        """A read is not fenced: one that a former owner had under way, when it was stopped or cut off, may take entries
        for as long as it waits on the server. They are its heir's as well, and not only when they are idle."""
        while True:
            await asyncio.sleep(INHERIT_AFTER_S[0] / 2)
            now = time.monotonic()
            self._heirs = {stream: times for stream, times in self._heirs.items() if times and stream in self._running}
            due = [stream for stream, times in self._heirs.items() if times[0] <= now]
            for at in range(0, len(due), IN_ONE_GO):
                await self._inherit_again([one for one in due[at : at + IN_ONE_GO] if one in self._running])

    async def _inherit_again(self, streams: Sequence[str]) -> None:
        some = [self._running[stream][0] for stream in streams]
        answers = await self._broker.run(together, [self._inherit(owned) for owned in some])
        for stream, owned, moved in zip(streams, some, answers, strict=True):
            if isinstance(moved, int) and self._heirs.get(stream):  # else it is tried again
                self._heirs[stream].pop(0)
                if moved:
                    owned.subscriber.look_again()

    async def _stop_many(self, streams: Sequence[str]) -> None:
        """Before leases are given back: what is in flight may still be acknowledged, after that it is refused."""
        patience_ms, owned = self.client.settings.lease_ms // 2, self.client.owned
        self._given_back |= {stream: owned[stream] for stream in streams if stream in owned}
        running = [self._running.pop(stream) for stream in streams if stream in self._running]
        await asyncio.gather(*(self._stop(*one, patience_ms=patience_ms) for one in running))

    async def _stop(self, owned: OwnedStream, task: asyncio.Task[None], *, patience_ms: int) -> None:
        await owned.subscriber.close(timeout_ms=patience_ms)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ended(self, stream: str, ending: asyncio.Task[None]) -> None:
        if self._ending.get(stream) is ending:
            del self._ending[stream]
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("the reading of %r did not end in order", stream, exc_info=error)


def assigned_subscriber(broker: Broker, service: str, handler: Handler, **options: Any) -> AssignedSubscriber:
    """Handles the messages of every stream that this member of ``service`` owns. Options: see AssignedSubscriber."""
    return AssignedSubscriber(broker, service, handler, **options)


class PartitionedSubscriber:
    """Looks to a router like a Subscriber: ``consume`` until ``close``."""

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
