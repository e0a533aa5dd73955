"""Members whose ways to the broker break at any moment, thousands of outages in virtual time.

An outage takes the answers of all that is under way, and refuses everything until it ends; it ends earlier or later
than others take over. When all of them are over, nothing is left with anybody, every message was handled, and every
book is empty. A storm is told by its seed, and comes out the same each time.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker import Link
from millstream.broker.context import Context
from millstream.errors import BrokerUnavailable
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.messaging.subscriber.book import Book
from millstream.messaging.subscriber.subscription import Subscription
from millstream.model import SystemClock
from millstream.wire import Args, Batch, Command
from virtual_time import run_in_virtual_time

STORMS = int(os.environ.get("TRIALS", "2"))
MEMBERS = 3
OUTAGES = 15
CLAIM_MS = 6_000
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "outputs": {"publish_to": "out"}, "in order": {"ordered_by_key": True}}


class VirtualClock(SystemClock):
    """What the broker's times are taken from passes with the loop's."""

    def now_ms(self) -> int:
        return 1_700_000_000_000 + self.monotonic_ms()


class StormyLink:
    """A member's way to the broker: a question and an answer take a moment each, and an outage takes both."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self._link = link
        self._chance = chance
        self._cut = asyncio.Event()
        self.away = False
        self.features = link.features
        self.now: Callable[[Args], Any] | None = None

    def cut(self, *, away: bool) -> None:
        self.away = away
        self._cut.set()
        self._cut = asyncio.Event()

    async def call(self, command: Command) -> Any:
        return await self._exchange(lambda: self._link.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        replies: list[Any] = await self._exchange(lambda: self._link.call_many(batch))
        return replies

    async def _exchange(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        cut = self._cut
        await asyncio.sleep(self._chance.random() * 0.02)
        if self.away:
            raise BrokerUnavailable("planted: refused")
        if cut.is_set() and self._chance.random() < 0.5:
            raise BrokerUnavailable("planted: lost on its way", may_have_been_applied=True)
        asked = asyncio.ensure_future(ask())
        broken = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait([asked, broken], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await asyncio.sleep(self._chance.random() * 0.02)
            if cut.is_set():
                raise BrokerUnavailable("planted: no answer", may_have_been_applied=True)
            return asked.result()
        finally:
            broken.cancel()
            asked.cancel()
            await asyncio.gather(asked, broken, return_exceptions=True)

    def listen(self, patterns: Any) -> Any:
        return self._link.listen(patterns)

    async def close(self) -> None:
        pass


class Storm:
    def __init__(self, seed: int, kind: str) -> None:
        self.chance = random.Random(seed)
        self.options = dict(KINDS[kind])
        self.publish_to = self.options.pop("publish_to", None)
        self.handled: Counter[bytes] = Counter()
        self.told: Counter[str] = Counter()
        self.links: list[StormyLink] = []

    async def run(self) -> None:
        sent: set[bytes] = set()
        async with open_broker("local://", clock=VirtualClock(), max_stream_len=None) as broker:
            members = [self._member(broker, f"member-{number}") for number in range(MEMBERS)]
            at_work = [
                asyncio.create_task(member.consume("orders", self._handle, publish_to=self.publish_to))
                for member in members
            ]
            async with Publisher(broker) as publisher:
                for _ in range(OUTAGES):
                    some = [b"%d" % (len(sent) + n) for n in range(self.chance.randrange(40))]
                    await publisher.publish("orders", *(Message(one, {"key": f"k{one[-1]}"}) for one in some))
                    sent.update(some)
                    await self._outage()
            for link in self.links:
                link.cut(away=False)
            for _ in range(60):  # each retry, rest and takeover takes a few of these at most
                await asyncio.sleep(CLAIM_MS / 1000)
                pending = await broker.xpending("orders", "g")
                held = [sorted(map(str, book.entries)) for book in map(book_of, members)]
                if not pending.count and not any(held):
                    break
            for member in members:
                await member.close()
            await asyncio.gather(*at_work)
        assert (pending.count, held) == (0, [[]] * MEMBERS), f"{pending}, {held}"
        assert set(self.handled) == sent
        assert not self.told["messaging.consumer_shared"]
        assert not self.told["messaging.part_restarted"]

    def _member(self, broker: Broker, name: str) -> Subscriber:
        link = StormyLink(broker.link, self.chance)
        self.links.append(link)
        context = Context(observer=self._observe, clock=broker.context.clock)
        return Subscriber(
            Broker(link, context),
            group="g",
            consumer=name,
            group_start="0",
            claim_min_idle_ms=CLAIM_MS,
            claim_interval_ms=500,
            max_deliveries=1000,
            **self.options,
        )

    def _observe(self, name: str, /, **_: Any) -> None:
        self.told[name] += 1

    async def _handle(self, message: Message) -> Message | None:
        self.handled[message.payload] += 1
        await asyncio.sleep(self.chance.choice([0, 0.01, 0.3, 8.0]))
        luck = self.chance.random()
        if luck < 0.05:
            raise ValueError("a handler's own")
        if luck < 0.1:
            raise RetryLater(delay_ms=self.chance.choice([1, 500, 9_000]), charged=luck < 0.07)
        return Message(message.payload) if self.publish_to else None

    async def _outage(self) -> None:
        some = self.links if self.chance.random() < 0.6 else [self.chance.choice(self.links)]
        for _ in range(self.chance.randrange(1, 4)):
            for link in some:
                link.cut(away=True)
            await asyncio.sleep(self.chance.choice([0, 0.1, 1, 1.2 * CLAIM_MS / 1000, 2 * CLAIM_MS / 1000]))
            for link in some:
                link.cut(away=False)
            await asyncio.sleep(self.chance.choice([0.03, 0.1, 0.5]) * self.chance.random())
        await asyncio.sleep(self.chance.choice([0, 0.5, 3, CLAIM_MS / 1000]))


def book_of(member: Subscriber) -> Book:
    (subscription,) = member._open
    assert isinstance(subscription, Subscription)
    return subscription._state.book


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(STORMS))
def test_nothing_is_left_with_anybody_when_a_storm_is_over(number: int, kind: str) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**9)
    print(f"SEED={seed}")
    random.seed(seed)  # pauses are spread by the common source
    run_in_virtual_time(Storm(seed, kind).run())
