"""The link to Redis for event loops: a shared, pipelined connection for what answers at once, own ones to wait on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.broker.limits import Limits
from millstream.broker.links.async_listener import AsyncListener
from millstream.broker.links.async_wire import AsyncWire
from millstream.broker.links.exchange import Exchange, Journey, NoAnswer, NotSent
from millstream.broker.links.journey import Traveller, unforeseen
from millstream.broker.links.link import Features
from millstream.broker.links.nodes import Node, Target
from millstream.broker.links.opening import PING, check_first_answer, open_stream, why_not_connected
from millstream.broker.links.routes import route_to
from millstream.broker.links.sentinel_watch import SentinelWatch
from millstream.broker.links.tls import ask_about_tls
from millstream.errors import BrokerClosed, MillstreamError
from millstream.model.clock import Clock
from millstream.model.observer import Observer
from millstream.wire.commands import Batch, Command

R = TypeVar("R")


class _Wires:
    """The connections of one event loop in one process; they are of no use to any other."""

    def __init__(
        self, target: Target, limits: Limits, loop: asyncio.AbstractEventLoop, forget: Callable[[], None]
    ) -> None:
        self._target = target
        self._limits = limits
        self.loop = loop
        self._shared: dict[Node, AsyncWire] = {}
        self._opening: dict[Node, asyncio.Lock] = {}
        self._spare: dict[Node, list[AsyncWire]] = {}
        self._out: dict[AsyncWire, Node] = {}
        self._answered: set[Node] = set()
        """Nodes that have answered, or that were asked about TLS once."""
        self._forget_primary = forget
        self._sentinels = SentinelWatch(target, self.open, self._switched) if target.kind == "sentinel" else None

    async def exchange(self, trip: Exchange) -> list[Any]:
        if self._sentinels is not None:
            self._sentinels.start()
        if not trip.alone:
            wire = self._shared.get(trip.node)
            if wire is None or not wire.in_order() or wire.idle_s * 1000 > self._limits.idle_check_ms:
                wire = await self._share(trip.node)
            return await wire.exchange(trip.requests, trip.wait_ms, whole=trip.whole, reading=trip.reading)
        wire = await self.take(trip.node)
        try:
            if trip.on_wait is not None:
                trip.on_wait(await wire.client_id())
            replies = await wire.exchange(trip.requests, trip.wait_ms, whole=trip.whole, reading=trip.reading)
        except BaseException:
            # Cancelled or broken: a reply may still be on its way, and must not meet the next one who waits here.
            self.discard(wire)
            raise
        self.give_back(trip.node, wire)
        return replies

    async def _share(self, node: Node) -> AsyncWire:
        """The node's shared connection; one task opens it while the others wait."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            wire = self._shared.get(node)
            if wire is not None:
                if await self._well(wire):
                    return wire
                wire.close("the server closed the connection")
            wire = self._shared[node] = await self.open(node)
            return wire

    async def take(self, node: Node) -> AsyncWire:
        """A connection for one task alone."""
        spare = self._spare.get(node, [])
        while spare:
            wire = spare.pop()
            if await self._well(wire):
                self._out[wire] = node
                return wire
            wire.close()
        wire = await self.open(node)
        self._out[wire] = node
        return wire

    async def _well(self, wire: AsyncWire) -> bool:
        """Whether a command may be trusted to it. After a long silence only an answer proves that."""
        if wire.alive and wire.idle_s * 1000 > self._limits.idle_check_ms:
            try:
                await wire.exchange([PING], 0, whole=False)
            except (NotSent, NoAnswer):
                return False
        return wire.in_order()

    def give_back(self, node: Node, wire: AsyncWire) -> None:
        self._out.pop(wire, None)
        spare = self._spare.setdefault(node, [])
        if wire.alive and len(spare) < self._limits.max_idle_connections:
            spare.append(wire)
        else:
            wire.close()

    def discard(self, wire: AsyncWire) -> None:
        self._out.pop(wire, None)
        wire.close("given up")

    async def open(self, node: Node) -> AsyncWire:
        """A new connection whose server has answered. Raises NotSent, or what no second try will mend."""
        try:
            wire = await self._open(node)
        except NotSent as error:
            if node not in self._answered:
                self._answered.add(node)
                if (trouble := await asyncio.to_thread(ask_about_tls, self._target, node)) is not None:
                    raise trouble from error
            raise
        self._answered.add(node)
        return wire

    async def _open(self, node: Node) -> AsyncWire:
        try:
            async with asyncio.timeout(self._limits.connect_ms / 1000):
                wire = AsyncWire(*await open_stream(self._target, node, self._limits), self._limits)
                try:
                    (reply,) = await wire.exchange([PING], 0, whole=False)
                    check_first_answer(self._target, node, reply)
                except BaseException:
                    wire.close()
                    raise
        except TimeoutError as error:
            raise NotSent(f"{node}: no connection within {self._limits.connect_ms} ms") from error
        except (NotSent, MillstreamError):
            raise
        except Exception as error:
            raise why_not_connected(self._target, node, error) from error
        return wire

    def _switched(self, primary: Node) -> None:
        """There is a new primary: whatever waits for the old one waits in vain."""
        self._forget_primary()
        for node, wire in self._all():
            if node.kind == "data" and node != primary:
                wire.close(f"{primary} is the primary now")

    def _all(self) -> list[tuple[Node, AsyncWire]]:
        spare = [(node, wire) for node, many in self._spare.items() for wire in many]
        return [*self._shared.items(), *spare, *((node, wire) for wire, node in self._out.items())]

    def close(self) -> None:
        if self._sentinels is not None:
            self._sentinels.close()
        for _, wire in self._all():
            wire.close()
        self._shared.clear()
        self._spare.clear()
        self._out.clear()


class RedisLink:
    """Thread-safe: every event loop has connections of its own. Fork-safe: a child makes new ones."""

    def __init__(self, target: Target, *, limits: Limits, clock: Clock, deadline_ms: int, observer: Observer) -> None:
        self.features = Features(cluster=target.kind == "cluster")
        self.now: Callable[[Command], Any] | None = None
        self.target = target
        self._limits = limits
        self._traveller = Traveller(route_to(target), clock, deadline_ms, observer)
        self._observer = observer
        self._pid = os.getpid()
        self._by_loop: dict[int, _Wires] = {}
        self._abandoned: list[Any] = []
        self._closed = False

    async def call(self, command: Command) -> Any:
        return await self._travel(self._traveller.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        if not batch.commands and batch.after is None:
            return []
        return await self._travel(self._traveller.call_many(batch))

    def listen(self, patterns: Any) -> AsyncListener:
        return AsyncListener(self, tuple(patterns), self._limits, self._observer)

    async def _travel(self, journey: Journey[R]) -> R:
        wires = self.wires()
        try:
            step = journey.send(None)
            while True:
                try:
                    result = await (wires.exchange(step) if type(step) is Exchange else asyncio.sleep(step.seconds))  # type: ignore[union-attr]
                except (NotSent, NoAnswer, MillstreamError) as trouble:
                    if self._closed:
                        raise closed() from trouble
                    step = journey.throw(trouble)
                else:
                    step = journey.send(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except MillstreamError:
            raise
        except Exception as error:
            raise unforeseen(error) from error
        finally:
            journey.close()

    def wires(self) -> _Wires:
        """This loop's connections."""
        if self._closed:
            raise closed()
        if os.getpid() != self._pid:
            self._after_fork()
        loop = asyncio.get_running_loop()
        wires = self._by_loop.get(id(loop))
        if wires is None or wires.loop is not loop:
            self._by_loop = {key: one for key, one in self._by_loop.items() if not one.loop.is_closed()}
            wires = self._by_loop[id(loop)] = _Wires(self.target, self._limits, loop, self._traveller.route.forget)
        return wires

    async def primaries(self) -> list[Node]:
        return await self._travel(self._traveller.route.primaries())

    async def open_own(self, node: Node) -> AsyncWire:
        """A connection outside the stock, for a listener."""
        return await self.wires().open(node)

    def _after_fork(self) -> None:
        # The parent's sockets and its selector are shared with this child: closing, or even collecting, a transport
        # here would take it out of the parent's selector. So the child keeps them and never touches them.
        self._abandoned.append(self._by_loop)
        self._by_loop = {}
        self._pid = os.getpid()

    async def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            return
        here = asyncio.get_running_loop()
        for wires in list(self._by_loop.values()):
            if wires.loop is here:
                wires.close()
            elif not wires.loop.is_closed():
                wires.loop.call_soon_threadsafe(wires.close)
        self._by_loop.clear()


def closed() -> BrokerClosed:
    return BrokerClosed("this broker was closed. Open another one with open_broker(url).")
