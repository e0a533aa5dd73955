"""A publisher reports a row as stored only with evidence for this row, and returns an id only if it is certain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from millstream import Broker, Publisher, open_broker
from millstream.errors import BrokerUnavailable, MillstreamError, NonDeterministicReplay, ServerError
from millstream.messaging import Message, batching
from millstream.model import suspend_aware_s
from millstream.testing import FaultyTransport
from millstream.testing.faults import Fault
from millstream.wire.commands import Batch, Command

LOST = BrokerUnavailable("planted: no answer", may_have_been_applied=True)


class OneFaultTransport(FaultyTransport):
    """Executes the first append, runs ``meanwhile``, and then raises."""

    def __init__(self, broker: Broker, error: BaseException, meanwhile: Callable[[], Any] | None = None) -> None:
        super().__init__(broker.transport)
        self._error: BaseException | None = error
        self._meanwhile = meanwhile

    async def call(self, command: Command) -> Any:
        reply = await super().call(command)
        if self._error is not None and command.args[0] == b"EVALSHA":
            error, self._error = self._error, None
            if self._meanwhile is not None:
                await self._meanwhile()
            raise error
        return reply


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with open_broker("local://") as broker:
        yield broker


async def stored(broker: Broker) -> list[bytes]:
    return [entry.fields[b"payload"] for entry in await broker.xrange("t")]


def messages(*texts: str) -> list[Message]:
    return [Message(text.encode()) for text in texts]


@pytest.mark.parametrize("error", [RuntimeError("planted"), AttributeError("planted"), ValueError("planted")])
async def test_messages_after_a_batch_with_an_unexpected_error_are_stored(broker: Broker, error: Exception) -> None:
    """The batch was executed without a reply; the next batch must not be mistaken for it."""
    async with Publisher(broker) as publisher:
        broker.transport = OneFaultTransport(broker, error)
        with pytest.raises(type(error)):
            await publisher.publish("t", *messages("a"))
        (entry_id,) = await publisher.publish("t", *messages("b"))
        assert await stored(broker) == [b"a", b"b"]
        assert entry_id == (await broker.xrange("t"))[1].id


async def test_messages_after_a_cancelled_sender_are_stored(broker: Broker) -> None:
    async with Publisher(broker) as publisher:
        broker.transport = OneFaultTransport(broker, asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await publisher.publish("t", *messages("a"))
        await publisher.publish("t", *messages("b"))
        assert await stored(broker) == [b"a", b"b"]


async def test_batch_with_a_lost_reply_is_recognized_by_its_token(broker: Broker) -> None:
    async with Publisher(broker) as publisher:
        await publisher.publish("t", *messages("before"))
        broker.transport = OneFaultTransport(broker, LOST)
        ids = await publisher.publish("t", *messages("a", "b", "c"))
        assert await stored(broker) == [b"before", b"a", b"b", b"c"]
        assert ids == [entry.id for entry in (await broker.xrange("t"))[1:]]


async def test_equal_batches_have_different_tokens(broker: Broker) -> None:
    same = Message(b"same")
    tokens = []
    async with Publisher(broker) as publisher:
        for _ in range(2):
            await publisher.publish("t", same)
            (key,) = [name for name in await _keys(broker) if b"once:" in name]
            tokens.append((await broker.hgetall(key))[b"0"].split()[2])
    assert len(set(tokens)) == 2
    assert all(len(token) == 32 for token in tokens)


async def test_marker_of_other_rows_is_an_error(broker: Broker) -> None:
    """As many rows as ours at the same position, but with another token: they are not ours."""

    async def other_rows() -> None:
        (key,) = [name for name in await _keys(broker) if b"once:" in name]
        version, rows, _, last = (await broker.hgetall(key))[b"0"].split()
        await broker.hset(key, {"0": b" ".join((version, rows, b"f" * 32, last))})

    async with Publisher(broker) as publisher:
        broker.transport = OneFaultTransport(broker, LOST, other_rows)
        with pytest.raises(NonDeterministicReplay):
            await publisher.publish("t", *messages("a"))
        await publisher.publish("t", *messages("b"))
        assert (await stored(broker))[-1] == b"b"


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_id_that_is_not_certain_is_none(broker: Broker, gone: int) -> None:
    """An entry of the batch was deleted before the ids were read back: the other ids are not shifted."""

    async def delete_one() -> None:
        entries = await broker.xrange("t")
        await broker.xdel("t", entries[1 + gone].id)

    async with Publisher(broker) as publisher:
        await publisher.publish("t", *messages("before"))
        broker.transport = OneFaultTransport(broker, LOST, delete_one)
        ids = await publisher.publish("t", *messages("a", "b", "c"))
        result = {entry.fields[b"payload"]: entry.id for entry in await broker.xrange("t")}
        ids_by_payload = dict(zip([b"a", b"b", b"c"], ids, strict=True))
        for text, entry_id in ids_by_payload.items():
            assert entry_id is None or entry_id == result.get(text) or text not in result
        assert sum(entry_id is not None for entry_id in ids) >= 2


async def test_unreadable_ids_do_not_fail_a_publish(broker: Broker) -> None:
    """The rows are confirmed: a broken connection while reading the ids back does not make them ambiguous."""

    class NoReading(OneFaultTransport):
        async def call(self, command: Command) -> Any:
            if command.args[0] == b"XREVRANGE":
                raise BrokerUnavailable("planted: gone again")
            return await super().call(command)

    async with Publisher(broker) as publisher:
        broker.transport = NoReading(broker, LOST)
        ids = await publisher.publish("t", *messages("a", "b"))
        assert ids[0] is None
        assert await stored(broker) == [b"a", b"b"]


async def test_every_transport_error_ends_in_stored_once_or_failed(broker: Broker) -> None:
    """Twenty batches, each with another fault: each confirmed row is stored once, in order."""
    kinds: list[BaseException] = [LOST, RuntimeError("planted"), BrokerUnavailable("planted"), OSError("planted")]
    confirmed = []
    own = broker.transport
    async with Publisher(broker) as publisher:
        for number in range(20):
            broker.transport = own
            broker.transport = OneFaultTransport(broker, kinds[number % len(kinds)])
            try:
                await publisher.publish("t", *messages(f"{number}a", f"{number}b"))
            except (MillstreamError, RuntimeError, OSError):
                continue
            confirmed += [b"%da" % number, b"%db" % number]
    result = await stored(broker)
    assert len(result) == len(set(result))
    assert [text for text in result if text in confirmed] == confirmed


async def _keys(broker: Broker) -> list[bytes]:
    keys: list[bytes] = await broker.transport.call(Command((b"KEYS", b"*")))
    return keys


@pytest.mark.parametrize("way", [{}, {"idempotency_key": "k"}], ids=["batch", "unique"])
async def test_ambiguous_publish_is_not_reported_as_not_stored(broker: Broker, way: dict[str, Any]) -> None:
    """The last error describes only the last attempt."""
    full = Fault(before=ServerError("MISCONF planted: the disk is full. Nothing was stored.", retryable=True))
    first = iter([Fault.answer_lost()])

    def choose(request: Command | Batch) -> Fault | None:
        return next(first, full) if isinstance(request, Command) and request.args[0] == b"EVALSHA" else None

    async with Publisher(Broker(FaultyTransport(broker.transport, choose), broker.context), retry_ms=1) as publisher:
        with pytest.raises(BrokerUnavailable) as caught:
            await publisher.publish("t", *messages("a"), **way)
    assert caught.value.may_have_been_applied
    assert await stored(broker) == [b"a"]


async def test_publish_is_not_repeated_after_a_long_suspension(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is suspended for a day between the append and its reply. The marker that proves the append, and by
    which a repeated one adds nothing, has expired: only an error is true."""
    suspended_s = 0.0
    monkeypatch.setattr(batching, "suspend_aware_s", lambda: suspend_aware_s() + suspended_s)

    async def suspend() -> None:
        nonlocal suspended_s
        suspended_s = 86_400.0
        for key in await broker.transport.call(Command((b"KEYS", b"{t}.once*"))):
            await broker.delete(key)

    async with Publisher(broker) as publisher:
        broker.transport = OneFaultTransport(broker, LOST, suspend)
        with pytest.raises(BrokerUnavailable) as refused:
            await publisher.publish("t", *messages("a"))
        assert refused.value.may_have_been_applied
        assert await stored(broker) == [b"a"]


async def test_marker_lives_an_hour_longer_than_the_publisher_retries(broker: Broker) -> None:
    async with Publisher(broker, retry_ms=7_200_000) as publisher:
        await publisher.publish("t", *messages("a"))
    [marker] = await broker.transport.call(Command((b"KEYS", b"{t}.once:*")))
    left_ms = await broker.transport.call(Command((b"PTTL", marker)))
    assert 3_600_000 + 7_100_000 < left_ms <= 7_200_000 + 3_600_000
