"""Success is concluded from evidence for the very rows of a call, never from a position, a count or the lack of an
error.

The server stores the rows and its reply is lost, or the caller is cancelled at any step. The next caller's rows must be
stored, and rows that are repeated must be stored once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from millstream import Broker, Publisher, Subscriber, open_blocking_broker, open_broker
from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.messaging import DeadLetters, Message
from millstream.messaging.codecs import codec
from millstream.testing import DeliveryLedger, eventually
from millstream.testing.answering import ANSWER_LOST, ProxyAnswer, Request, pass_on, refusal
from support.proxied import AnsweringProxies, Servers

SCRIPTS = frozenset({b"EVALSHA", b"EVAL"})


def lose_answers(request: Request) -> ProxyAnswer | None:
    """Every command is executed, and its reply is lost."""
    return ANSWER_LOST if request.name in SCRIPTS else None


async def payloads(servers: Servers, stream: str) -> dict[str, object]:
    async with open_broker(servers.url) as direct:
        entries = await direct.xrange(stream)
    result = {codec("flat").decode(entry.fields).payload.decode(): entry.id for entry in entries}
    assert len(result) == len(entries), "an entry is stored twice"
    return result


async def test_abandoned_batch_is_not_mistaken_for_the_next_one(servers: Servers) -> None:
    with AnsweringProxies(servers) as proxy:
        async with open_broker(proxy.url, deadline_ms=1) as broker, Publisher(broker, retry_ms=1) as publisher:
            await publisher.publish("orders", Message(b"first"))
            for number in range(5):
                proxy.choose = lose_answers
                with pytest.raises(BrokerUnavailable):
                    await publisher.publish("orders", Message(b"given up %d" % number))
                proxy.choose = pass_on
                (replied,) = await publisher.publish("orders", Message(b"next %d" % number))
                there = await payloads(servers, "orders")
                assert there[f"next {number}"] == replied
                assert f"given up {number}" in there, "it was stored although its caller received no reply"


async def test_publish_repeated_after_a_lost_reply_is_stored_once(
    servers: Servers,
) -> None:
    with AnsweringProxies(servers) as proxy:
        lost = 0

        def lose_some(request: Request) -> ProxyAnswer | None:
            nonlocal lost
            if request.name in SCRIPTS and lost < 4:
                lost += 1
                return ANSWER_LOST
            return None

        async with open_broker(proxy.url) as broker, Publisher(broker) as publisher:
            await publisher.publish("others", Message(b"so that the server knows the script"))
            proxy.choose = lose_some
            ids = await publisher.publish("orders", *(Message(b"%d" % n) for n in range(5)))
        there = await payloads(servers, "orders")
    assert lost == 4
    assert ids == [there[str(n)] for n in range(5)]


async def test_publisher_with_a_used_id_gets_no_false_confirmation(
    servers: Servers,
) -> None:
    """As on a virtual machine that was copied while it ran: the marker has the expected position, but is of other
    rows."""
    async with open_broker(servers.url) as broker, Publisher(broker) as first, Publisher(broker) as second:
        second.id = first.id
        await first.publish("orders", Message(b"mine"))
        try:
            await second.publish("orders", Message(b"another"))
        except MillstreamError:
            replied = False
        else:
            replied = True
        assert ("another" in await payloads(servers, "orders")) is replied


async def test_replay_interrupted_at_any_command_loses_no_dead_letter(servers: Servers) -> None:
    """A dead letter is always in one of the two streams, and another replay adds it to its stream once."""
    async with open_broker(servers.url) as direct:
        for number in range(8):
            stream = f"orders-{number}"
            await dead_letter(direct, stream)
            with AnsweringProxies(servers, RefuseOne(number)) as proxy:
                async with open_broker(proxy.url) as broker:
                    with contextlib.suppress(MillstreamError):
                        await DeadLetters(broker, stream).replay()
            dlq = DeadLetters(direct, stream)
            remaining = {codec("flat").decode(letter.fields).payload for letter in await dlq.list()}
            back = [codec("flat").decode(entry.fields).payload for entry in await direct.xrange(stream)][3:]
            assert remaining | set(back) == {b"0", b"1", b"2"}, f"broken off at command {number}"
            await dlq.replay()
            assert await dlq.count() == 0
            again = [codec("flat").decode(entry.fields).payload for entry in await direct.xrange(stream)][3:]
            assert sorted(again) == [b"0", b"1", b"2"], f"broken off at command {number}"


class RefuseOne:
    """Refuses the command of this number with a permanent error."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, request: Request) -> ProxyAnswer | None:
        if request.opening or not request.args:
            return None
        self._left -= 1
        return refusal("NOPERM planted") if self._left == -1 else None


async def dead_letter(broker: Broker, stream: str) -> None:
    """Publishes three messages to the stream and dead-letters them."""
    subscriber = Subscriber(broker, group="g", group_start="0", block_ms=50, max_deliveries=1)

    async def fail(message: Message) -> None:
        raise ValueError("planted")

    running = asyncio.create_task(subscriber.consume(stream, fail))
    async with Publisher(broker) as publisher:
        await publisher.publish(stream, *(Message(b"%d" % n) for n in range(3)))

    async def dead_lettered() -> bool:
        return await DeadLetters(broker, stream).count() == 3

    await eventually(dead_lettered, what="three dead letters")
    await subscriber.close()
    await running


async def test_rows_repeated_after_a_cancelled_call_are_stored_once(servers: Servers) -> None:
    """Cancels the call at every step, before and after the server has stored the rows."""
    chance = random.Random(7)
    delivered = 0
    async with open_broker(servers.url) as broker:
        once = broker.once_writer("rows", "w", 1)
        for _ in range(150):
            rows = [{"n": delivered + n} for n in range(chance.randrange(1, 4))]
            call = asyncio.create_task(once.append(rows))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.wait([call])
            if call.cancelled():
                await once.append(rows)
            delivered += len(rows)
            assert once.position == delivered
        await once.finish()
        assert [int(entry.fields[b"n"]) for entry in await broker.xrange("rows")] == list(range(delivered))


async def test_cancelled_callers_do_not_affect_others(servers: Servers) -> None:
    """Replies are lost and every other caller is cancelled: each id that a caller received belongs to one stored
    entry."""
    chance = random.Random(11)
    ledger = DeliveryLedger()
    replied: dict[str, object] = {}

    def lose_some(request: Request) -> ProxyAnswer | None:
        return ANSWER_LOST if request.name in SCRIPTS and chance.random() < 0.1 else None

    async def publish(publisher: Publisher, token: str) -> None:
        ledger.sending(token)
        (replied[token],) = await publisher.publish("orders", Message(token.encode()))
        ledger.confirmed(token)

    with AnsweringProxies(servers, lose_some) as proxy:
        async with open_broker(proxy.url) as broker, Publisher(broker, max_batch=7) as publisher:
            for first in range(0, 600, 20):
                calls = [asyncio.create_task(publish(publisher, f"{first + n}")) for n in range(20)]
                await asyncio.sleep(chance.random() * 0.004)
                for call in calls[::2]:
                    call.cancel()
                await asyncio.wait(calls)
    there = await payloads(servers, "orders")
    balance = ledger.balance(list(there))
    assert balance.exactly_once, str(balance)
    assert balance.confirmed >= 300
    assert {token: there[token] for token, entry_id in replied.items() if entry_id} == {
        token: entry_id for token, entry_id in replied.items() if entry_id
    }


async def test_transport_is_usable_after_cancelled_calls_with_lost_replies(
    servers: Servers,
) -> None:
    """No reply of one call reaches another call, also after cancellations."""
    chance = random.Random(13)

    def lose_some(request: Request) -> ProxyAnswer | None:
        return ANSWER_LOST if not request.opening and request.args and chance.random() < 0.02 else None

    async with open_broker(servers.url) as direct:
        await direct.create_group("waited", "g", start="$")
        for number in range(20):
            await direct.set(f"key {number}", number)
    with AnsweringProxies(servers, lose_some) as proxy:
        async with open_broker(proxy.url) as broker:

            async def look(number: int) -> None:
                assert await broker.get(f"key {number}") == b"%d" % number

            async def wait() -> None:
                await broker.xread({f"nothing {chance.random()}": "0"}, block_ms=chance.randrange(1, 30))

            for _ in range(40):
                calls = [asyncio.create_task(look(number)) for number in range(20)]
                calls += [asyncio.create_task(wait()) for _ in range(4)]
                await asyncio.sleep(chance.random() * 0.003)
                for call in chance.sample(calls, 10):
                    call.cancel()
                for result in await asyncio.gather(*calls, return_exceptions=True):
                    assert result is None or isinstance(result, (asyncio.CancelledError, MillstreamError)), result


def test_interrupted_thread_leaves_the_blocking_transport_usable(servers: Servers) -> None:
    """A lost reply closes its connection: the next call gets its own reply."""
    count = 0

    def lose_every_third(request: Request) -> ProxyAnswer | None:
        nonlocal count
        count += not request.opening and bool(request.args)
        return ANSWER_LOST if not request.opening and request.args and count % 3 == 0 else None

    with AnsweringProxies(servers, lose_every_third) as proxy, open_blocking_broker(proxy.url) as broker:
        for number in range(60):
            with contextlib.suppress(BrokerUnavailable):
                broker.set("key", number)
            assert broker.get("key") == b"%d" % number
