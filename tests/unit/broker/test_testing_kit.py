"""The testing kit detects planted faults."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from millstream import Broker, open_blocking_broker, open_broker
from millstream.broker.scripts.script import script
from millstream.errors import BrokerUnavailable
from millstream.testing import (
    DeliveryLedger,
    Fault,
    FaultyBlockingTransport,
    FaultyTransport,
    eventually,
    free_port,
    wait_until,
)
from millstream.testing.conformance import AppendOnceChapter, GroupChapter, TrimmingChapter
from millstream.wire.commands import Batch, Command


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with open_broker(f"local://{uuid4().hex}", max_stream_len=None) as opened:
        yield opened


class Planted:
    """A transport that replaces one command by another."""

    def __init__(self, transport: Any, change: Any) -> None:
        self._transport = transport
        self._change = change
        self.now = None
        self.features = transport.features

    async def call(self, command: Command) -> Any:
        return await self._transport.call(self._change(command))

    async def call_many(self, batch: Batch) -> Any:
        return await self._transport.call_many(batch)

    async def close(self) -> None:
        await self._transport.close()


async def test_suite_finds_an_unfenced_acknowledgement(broker: Broker) -> None:
    def unfenced(command: Command) -> Command:
        if command.args[:2] != (b"EVALSHA", script("ack_fenced").sha):
            return command
        _, _, _, stream, group, _, *ids = command.args
        return Command((b"XACK", stream, group, *ids), stream)

    broker.transport = Planted(broker.transport, unfenced)  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        await GroupChapter().test_a_fenced_acknowledgement_needs_the_current_consumer(broker, "s")


async def test_suite_finds_a_trim_that_ignores_groups(broker: Broker) -> None:
    def rash(command: Command) -> Command:
        if command.args[:2] != (b"EVALSHA", script("trim_safely").sha):
            return command
        _, _, number_of_keys, stream, *others = command.args
        return Command((b"XTRIM", stream, b"MAXLEN", others[int(number_of_keys) - 1]), command.key)

    broker.transport = Planted(broker.transport, rash)  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        await TrimmingChapter().test_pending_entries_are_needed(broker, "s")


async def test_suite_finds_an_append_without_marker(broker: Broker) -> None:
    versions = iter(range(1, 100))

    def next_version(command: Command) -> Command:
        if command.args[:2] != (b"EVALSHA", script("append_once").sha):
            return command
        words = list(command.args)
        words[6] = b"%d" % next(versions)
        return command._replace(args=tuple(words))

    broker.transport = Planted(broker.transport, next_version)  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        await AppendOnceChapter().test_a_repeated_append_changes_nothing(broker, "s")


async def test_faults_by_number(broker: Broker) -> None:
    transport = FaultyTransport(broker.transport, [None, Fault.refused(), Fault.answer_lost()])
    broker.transport = transport

    await broker.xadd("s", {"n": 1})
    with pytest.raises(BrokerUnavailable) as refused:
        await broker.xadd("s", {"n": 2})
    with pytest.raises(BrokerUnavailable) as lost:
        await broker.xadd("s", {"n": 3})

    assert (refused.value.may_have_been_applied, lost.value.may_have_been_applied) == (False, True)
    assert [entry.text("n") for entry in await broker.xrange("s")] == ["1", "3"]
    assert [request.args[0] for request in transport.plan.requests if isinstance(request, Command)].count(b"XADD") == 3


def test_faults_by_choice() -> None:
    def no_batches(request: Command | Batch) -> Fault | None:
        return Fault.refused() if isinstance(request, Batch) else None

    with open_blocking_broker(f"local://{uuid4().hex}") as broker:
        broker.transport = FaultyBlockingTransport(broker.transport, no_batches)
        broker.xadd("s", {"n": 1})
        with pytest.raises(BrokerUnavailable):
            broker.xadd_many("s", [{"n": 2}])


def test_ledger_finds_violations() -> None:
    ledger = DeliveryLedger()
    ledger.sending("a", "b", "c", "d")
    ledger.confirmed("a", "b", "c")
    assert ledger.missing() == {"a", "b", "c"}
    ledger.arrived("a", "a", "d", "x")

    balance = ledger.balance()

    assert balance.lost == {"b", "c"}
    assert balance.unconfirmed == {"d"}
    assert balance.duplicated == {"a": 2}
    assert balance.invented == {"x"}
    assert not balance.nothing_lost
    assert not ledger.balance(["a", "b", "b", "c"]).exactly_once
    assert ledger.balance(["a", "b", "c"]).exactly_once
    assert "lost 2" in str(balance)


async def test_timeout_names_the_awaited_condition() -> None:
    with pytest.raises(TimeoutError, match="the moon"):
        wait_until(lambda: False, what="the moon", timeout_s=0.02)
    with pytest.raises(TimeoutError, match="the sun"):
        await eventually(lambda: False, what="the sun", timeout_s=0.02)
    assert await eventually(lambda: 7) == 7


async def test_condition_is_checked_once_more_at_the_timeout() -> None:
    def ready_after_a_stall() -> bool:
        looks.append(time.monotonic())
        time.sleep(0.03)  # the stall: longer than the whole wait
        return len(looks) == 2

    looks: list[float] = []
    assert wait_until(ready_after_a_stall, timeout_s=0.02)
    looks.clear()
    assert await eventually(ready_after_a_stall, timeout_s=0.02)


def test_free_port_is_not_given_to_another_socket() -> None:
    """A connection's own end, or a server on any port, would take it before its server listens."""
    with socket.create_server(("127.0.0.1", 0)) as anybody:
        one_of_the_systems = anybody.getsockname()[1]
        ports = [free_port() for _ in range(50)]
        assert max(ports) < one_of_the_systems
    assert len(set(ports)) == 50
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


DRAWN_FIRST = """
import millstream.testing.servers as servers
chance, drawn = servers.secrets.randbelow, [{port}]
servers.secrets.randbelow = lambda below: drawn.pop() - servers.MIN_PORT if drawn else chance(below)
print(servers.free_port(), drawn)
"""


def test_free_port_is_reserved_for_one_process() -> None:
    """Two processes that start servers at the same moment, and draw the same number."""
    port = free_port()
    words = [sys.executable, "-c", DRAWN_FIRST.format(port=port)]
    result, remaining = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert remaining == "[]", "it was drawn"
    assert int(result) != port
