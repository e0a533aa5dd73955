"""The join with messaging: a subscriber on every stream that this member owns, guarded by the stream's token.

In: notifications of the member. Out: handlers that ran. A stream is read by its owner alone, so whatever others left
pending on it is the new owner's at once, without waiting until it is idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.assignment.client import AssignmentClient
from millstream.assignment.leases import Token
from millstream.assignment.notifications import StreamAdded, StreamDisowned, StreamTerminated
from millstream.assignment.partitions import announce_partitions
from millstream.assignment.settings import Settings
from millstream.broker import Broker, Gathering, inherit_consumers
from millstream.errors import InvalidArgument, MillstreamError
from millstream.messaging import Handler, Subscriber, keep_running
from millstream.model import Observer

log = logging.getLogger(__name__)

INHERIT_AFTER_S = (1.0, 3.0)
"""After a stream was taken; and once more when the longest read of a former owner has come back."""


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
        publish_to: str | None = None,
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
        self._running: dict[str, tuple[Subscriber, asyncio.Task[None]]] = {}
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
        return self.client.ready and all(subscriber.ready for subscriber, _ in self._running.values())

    @property
    def readiness(self) -> dict[str, bool]:
        """The member, and each stream that it owns: whether it is being read."""
        streams = {stream: subscriber.ready for stream, (subscriber, _) in self._running.items()}
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

    async def _follow(self) -> None:
        async for one in self.client.start():
            if isinstance(one, StreamAdded) and one.token is not None:
                back = self._given_back.get(one.stream)
                if back is None or one.token.number > back.number:
                    self._start(one.token)
            elif isinstance(one, (StreamDisowned, StreamTerminated)):
                await self._stop(one.stream, patience_ms=0)
                if self._given_back.get(one.stream) == one.token:
                    del self._given_back[one.stream]

    async def close(self, timeout_ms: int | None = None) -> None:
        """Finishes what is in flight, hands back the rest, and then the streams: nothing has to time out.

        With ``timeout_ms`` handlers may take so long, for the leases are held meanwhile; without, half a lease.
        """
        if timeout_ms is not None:
            self._draining = True
            await asyncio.gather(*(subscriber.close(timeout_ms) for subscriber, _ in self._running.values()))
        await self.client.close()

    def _stream(self, token: Token) -> str:
        return self._leased.get(token.stream, token.stream)

    def _start(self, token: Token) -> None:
        if self._draining:
            return  # it goes back in a moment
        mine = self._broker.behind(token.guard())
        subscriber = Subscriber(mine, group=self._group, consumer=self.client.id, **self._options)
        subscriber.begin_only_until(lambda: self.client.certain_until(token))
        task = asyncio.create_task(self._consume(subscriber, token))
        self._running[token.stream] = (subscriber, task)
        now, longest_s = time.monotonic(), subscriber.settings.read_block_ms / 1000 + INHERIT_AFTER_S[0]
        self._heirs[token.stream] = [now + after_s for after_s in (*INHERIT_AFTER_S, longest_s)]

    async def _consume(self, subscriber: Subscriber, token: Token) -> None:
        try:
            await self._inherit(token)
            await subscriber.consume(self._stream(token), self._handler, publish_to=self._publish_to)
        except Exception as error:  # whatever it was: an owned stream that nobody reads is the worst of all
            if self.client.owned.get(token.stream) == token:
                await self._give_up(token, error)

    async def _give_up(self, token: Token, error: Exception) -> None:
        log.error("cannot read %r, releasing it", token.stream, exc_info=error)
        # Not at once: where there is nobody else, it comes back to us.
        await asyncio.sleep(self.client.settings.renew_interval_ms / 1000)
        # Off the list first: releasing stops what is on it, and would wait for this very task.
        self._running.pop(token.stream, None)
        try:
            await self.client.release(token.stream)
        except MillstreamError as trouble:
            log.info("%r was not released: %s", token.stream, trouble)

    async def _inherit(self, token: Token) -> int:
        """Takes what former owners left pending, with their delivery counts; their names go. Behind the token: a member
        that was stopped past its lease would take from its heir what that is working on."""
        mine = self._broker.behind(token.guard()).context
        return await self._inheriting.run(inherit_consumers(mine, self._stream(token), self._group, self.client.id))

    async def _go_on_inheriting(self) -> None:
        """A read is not fenced: one that a former owner had under way, when it was stopped or cut off, may take entries
        for as long as it waits on the server. They are its heir's as well, and not only when they are idle."""
        while True:
            await asyncio.sleep(INHERIT_AFTER_S[0] / 2)
            now = time.monotonic()
            self._heirs = {stream: times for stream, times in self._heirs.items() if times and stream in self._running}
            owned = self.client.owned
            due = [stream for stream, times in self._heirs.items() if times[0] <= now and stream in owned]
            answers = await asyncio.gather(*(self._inherit(owned[stream]) for stream in due), return_exceptions=True)
            for stream, moved in zip(due, answers, strict=True):
                if isinstance(moved, int) and self._heirs.get(stream):  # else it is tried again
                    self._heirs[stream].pop(0)
                    if moved and stream in self._running:
                        self._running[stream][0].look_again()

    async def _stop_many(self, streams: Sequence[str]) -> None:
        """Before leases are given back: what is in flight may still be acknowledged, after that it is refused."""
        patience_ms = self.client.settings.lease_ms // 2
        self._given_back |= {stream: token for stream, token in self.client.owned.items() if stream in set(streams)}
        await asyncio.gather(*(self._stop(stream, patience_ms=patience_ms) for stream in streams))

    async def _stop(self, stream: str, *, patience_ms: int) -> None:
        found = self._running.pop(stream, None)
        if found is None:
            return
        subscriber, task = found
        await subscriber.close(timeout_ms=patience_ms)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def assigned_subscriber(broker: Broker, service: str, handler: Handler, **options: Any) -> AssignedSubscriber:
    """Handles the messages of every stream that this member of ``service`` owns. Options: see AssignedSubscriber."""
    return AssignedSubscriber(broker, service, handler, **options)
