"""The fault table holds for every error, in every phase of a call, over the async and the blocking transport.

A proxy in front of a real redis-server, or of a cluster of three, injects the error. The raised error is compared with
the table, and the content of the stream with the outcome that the error promises.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream import BlockingBroker, Broker, open_blocking_broker, open_broker
from millstream.errors import MillstreamError
from millstream.testing import eventually
from millstream.testing.answering import ANSWER_LOST, ProxyAnswer, Request, pass_on, refusal
from support.fault_table import TABLE, FaultRow, Follows, Phase, markdown
from support.proxied import AnsweringProxies, Servers, each

PAGE = Path(__file__).parents[3] / "docs" / "operate" / "faults.md"
STREAM = "orders"
ROWS = [{"n": n} for n in range(5)]
TWICE = 2
"""A single refusal could be tolerated by chance."""
DEADLINE_MS = 60_000
ANSWERED_S = 30.0
ONCE_MORE = pytest.mark.at_length
"""On a cluster, `make test` shows what follows a first command."""
CELLS = [
    pytest.param(
        *(place, fault, phase),
        id=f"{place} {fault.name} {phase.value}",
        marks=ONCE_MORE if place == "cluster" and phase is not Phase.COMMAND else (),
    )
    for place in ("redis", "cluster")
    for fault in TABLE
    for phase in Phase
    if fault.follows(phase) is not Follows.NEVER and fault.name != "WRONGPASS"  # which only a login receives
]


class Refusing:
    """Replies in place of the server in one phase, a number of times; then it forwards everything."""

    def __init__(self, fault: FaultRow, phase: Phase, place: str, times: float) -> None:
        self._answer = self._made(fault, phase, place)
        self._phase = phase
        self._fault = fault
        self._left = times
        self._refused_on: int | None = None
        self._lock = threading.Lock()
        self.refused = 0

    def _made(self, fault: FaultRow, phase: Phase, place: str) -> ProxyAnswer:
        if not fault.text:
            return ANSWER_LOST
        text = fault.text.format(slot=105, place=place)
        return refusal(text, after_s=0.02 if phase is Phase.BLOCKED else 0.0, cut=fault.name == "max clients")

    def __call__(self, request: Request) -> ProxyAnswer | None:
        with self._lock:
            if not self._meant(request):
                return None
            if self._phase is not Phase.BATCH or self._refused_on != request.connection or self._starts_again(request):
                # Of a batch everything behind the refused command is refused too, and that is one refusal.
                if self._left <= 0:
                    self._refused_on = None
                    return None
                self._left -= 1
                self.refused += 1
            self._refused_on = request.connection
            return self._answer

    def _starts_again(self, request: Request) -> bool:
        return b"2" in request.args

    def _meant(self, request: Request) -> bool:
        if self._phase is Phase.CONNECTING:
            return request.opening and bool(request.args) == (self._fault.name != "max clients")
        if request.opening or not request.args:
            return False
        if self._phase is Phase.BLOCKED:
            return request.blocks
        if self._phase is Phase.TRANSACTION:
            at_the_end = self._fault.name.startswith("EXECABORT") or not self._fault.text
            return request.in_transaction and (request.name == b"EXEC" if at_the_end else b"2" in request.args)
        if self._fault.name == "NOSCRIPT":
            return request.name == b"EVALSHA"
        if self._phase is Phase.BATCH:
            return request.name == b"XADD" and request.args[-1] in (b"2", b"3", b"4")
        return request.name == b"XADD"


Ask = Callable[[str], Awaitable[Any]]


class Asking:
    """The operation of each phase, over either transport. ``first`` is sent before the fault, to open the
    connection."""

    def __init__(self, fault: FaultRow, phase: Phase) -> None:
        self._scripted = fault.name == "NOSCRIPT"
        self._phase = phase

    async def first(self, broker: Broker | BlockingBroker) -> None:
        if self._phase is not Phase.CONNECTING:
            await waited(broker.ping)
        if self._phase is Phase.BLOCKED:
            await waited(broker.create_group, STREAM, "billing", start="$")
            await waited(broker.xreadgroup, STREAM, "billing", "c", block_ms=1)

    async def ask(self, broker: Broker | BlockingBroker) -> Any:
        if self._phase is Phase.BLOCKED:
            return await waited(broker.xreadgroup, STREAM, "billing", "c", block_ms=30_000)
        if self._scripted:
            many = ROWS if self._phase is Phase.BATCH else ROWS[:1]
            return await waited(broker.append_once, STREAM, "w", 1, 0, many)
        if self._phase is Phase.COMMAND or self._phase is Phase.CONNECTING:
            return await waited(broker.xadd, STREAM, {"n": 0})
        return await waited(broker.xadd_many, STREAM, ROWS, atomic=self._phase is Phase.TRANSACTION)

    @property
    def stores(self) -> list[bytes]:
        """What is stored after the operation succeeded."""
        if self._phase is Phase.BLOCKED:
            return []
        if self._phase in (Phase.BATCH, Phase.TRANSACTION):
            return [b"0", b"1", b"2", b"3", b"4"]
        return [b"0"]


async def waited(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of an operation of either broker; the blocking one runs on a thread."""
    if isinstance(call.__self__, Broker):  # type: ignore[attr-defined]  # a method
        return await call(*args, **options)
    return await asyncio.to_thread(call, *args, **options)


@pytest.fixture(params=["loops", "threads"])
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[..., Broker | BlockingBroker]]:
    """Opens brokers of one kind, and closes them."""
    batch: list[Any] = []

    def open_one(url: str, **options: Any) -> Broker | BlockingBroker:
        make: Any = open_broker if request.param == "loops" else open_blocking_broker
        batch.append(make(url, **options))
        return batch[-1]  # type: ignore[no-any-return]

    yield open_one
    for item in batch:
        if isinstance(item, BlockingBroker):
            item.close()


async def stored(servers: Servers) -> list[bytes]:
    async with open_broker(servers.url) as direct:
        return [entry.fields[b"n"] for entry in await direct.xrange(STREAM)]


async def outcome(
    servers: Servers, fault: FaultRow, phase: Phase, broker: Broker | BlockingBroker, refusing: Refusing, begin: Any
) -> Any:
    """The operation's result or error. A blocked reader gets an entry while it waits."""
    asking = Asking(fault, phase)
    await asking.first(broker)
    begin()
    call = asyncio.ensure_future(asking.ask(broker))
    if phase is Phase.BLOCKED:

        async def waits_or_is_done() -> bool:
            async with open_broker(servers.url) as direct:
                return call.done() or int((await direct.server_info("clients"))["blocked_clients"]) > 0

        await eventually(lambda: refusing.refused, what="a refusal")
        await eventually(waits_or_is_done, what="the reader to wait")
        async with open_broker(servers.url) as direct:
            await direct.xadd(STREAM, {"n": b"new"})
    try:
        return await asyncio.wait_for(call, ANSWERED_S)
    except MillstreamError as error:
        return error


@pytest.mark.parametrize(("servers", "fault", "phase"), CELLS, indirect=["servers"])
async def test_faults_have_the_documented_consequences(
    servers: Servers, opened: Callable[..., Broker | BlockingBroker], fault: FaultRow, phase: Phase
) -> None:
    follows = fault.follows(phase)
    times = TWICE if follows in (Follows.RETRIED, Follows.FOLLOWED) else 1
    with AnsweringProxies(servers) as proxy:
        refusing = Refusing(fault, phase, f"127.0.0.1:{each(servers)[0].port}", times)
        broker = opened(proxy.url, deadline_ms=DEADLINE_MS)
        got = await outcome(servers, fault, phase, broker, refusing, lambda: setattr(proxy, "choose", refusing))
        there = await stored(servers)
        heard = refusing.refused
        proxy.choose = pass_on
        again = await waited(broker.xlen, STREAM)
        if isinstance(broker, Broker):
            await broker.close()

    assert heard, "the server was never asked in this phase"
    assert again == len(there), "the connection is in order afterwards"
    asked = Asking(fault, phase)
    if follows in (Follows.RETRIED, Follows.FOLLOWED):
        assert not isinstance(got, MillstreamError), got
        assert there == (asked.stores or [b"new"])
        if phase is Phase.BLOCKED:
            assert [entry.fields for entry in got] == [{b"n": b"new"}]
        return
    assert isinstance(got, fault.raises), got
    assert heard == 1, "asked again, though that cannot help"
    if follows is Follows.PERHAPS:
        assert vars(got)["may_have_been_applied"]
        return
    assert not got.retryable
    stored_before = [b"0", b"1"] if phase is Phase.BATCH and fault.name != "NOSCRIPT" else []
    assert there == (stored_before or ([b"new"] if phase is Phase.BLOCKED else []))


PASSING = [pytest.param(fault, id=fault.name) for fault in TABLE if fault.command is Follows.RETRIED]


@pytest.mark.parametrize("fault", PASSING)
async def test_transient_error_beyond_the_deadline_is_raised_as_retryable(
    servers: Servers, opened: Callable[..., Broker | BlockingBroker], fault: FaultRow
) -> None:
    with AnsweringProxies(servers) as proxy:
        refusing = Refusing(fault, Phase.COMMAND, "", times=10**6)
        broker = opened(proxy.url, deadline_ms=60)
        got = await outcome(servers, fault, Phase.COMMAND, broker, refusing, lambda: setattr(proxy, "choose", refusing))
        if isinstance(broker, Broker):
            await broker.close()
    assert isinstance(got, fault.raises), got
    assert got.retryable
    assert await stored(servers) == []


async def test_endless_redirection_is_retryable(
    servers: Servers, opened: Callable[..., Broker | BlockingBroker]
) -> None:
    """A cluster that moves slots for longer than a deadline is no reason to dead-letter a message."""
    moved = next(fault for fault in TABLE if fault.name == "MOVED")
    with AnsweringProxies(servers) as proxy:
        refusing = Refusing(moved, Phase.COMMAND, proxy.place, times=10**6)
        broker = opened(proxy.url, deadline_ms=200)
        got = await outcome(servers, moved, Phase.COMMAND, broker, refusing, lambda: setattr(proxy, "choose", refusing))
        if isinstance(broker, Broker):
            await broker.close()
    assert isinstance(got, MillstreamError)
    assert got.retryable, got
    assert await stored(servers) == []


async def test_refused_login_is_permanent_and_delayed_login_is_transient(
    servers: Servers, opened: Callable[..., Broker | BlockingBroker]
) -> None:
    """With a password the first command is AUTH, which gets the same faults."""
    place = f"127.0.0.1:{each(servers)[0].port}"
    for fault in TABLE:
        if fault.connecting in (Follows.NEVER, Follows.PERHAPS) or not fault.text:
            continue
        with AnsweringProxies(servers) as proxy:
            refusing = Refusing(fault, Phase.CONNECTING, place, TWICE)

            def login(request: Request, refusing: Refusing = refusing) -> ProxyAnswer | None:
                return refusing(request) or (ProxyAnswer(b"+OK\r\n") if request.name == b"AUTH" else None)

            proxy.choose = login
            broker = opened(proxy.url.replace("://", "://:s3cret@"), deadline_ms=DEADLINE_MS)
            got: Any
            try:
                got = await waited(broker.xadd, STREAM, {"n": fault.name})
            except MillstreamError as error:
                got = error
            if isinstance(broker, Broker):
                await broker.close()
        if fault.connecting is Follows.FATAL:
            assert isinstance(got, fault.raises), (fault.name, got)
            assert refusing.refused == 1, fault.name
            assert "s3cret" not in str(got)
        else:
            assert not isinstance(got, MillstreamError), (fault.name, got)
            assert refusing.refused == TWICE, fault.name


def test_page_contains_the_fault_table() -> None:
    assert markdown() in PAGE.read_text(), "put the output of `python tests/support/fault_table.py` into the page"
