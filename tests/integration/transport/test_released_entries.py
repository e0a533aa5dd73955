"""Entries that XNACK released (Redis 8.8), of which no server can be installed here: the scripts run on a real server,
and XPENDING answers as the documentation of 8.8 says. Released entries have no owner and the idle time -1, and come
first, in any order of ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker import Context
from millstream.broker.keys import companion_key, due_key, recreated_key
from millstream.broker.operations.pending import xpending, xpending_range
from millstream.broker.scripts.emulations import emulation
from millstream.broker.scripts.script import script
from millstream.testing import RedisProcess
from millstream.wire import Command

LONG_IDLE_MS = 600_000
RELEASED = [["9-0", "", -1, 1], ["7-0", "", -1, 0]]
"""Two released entries, the one with the greater id first: it was released first."""
OWNED = [["3-0", "dead", LONG_IDLE_MS, 1], ["5-0", "alive", 10, 1]]
FATAL = 9_223_372_036_854_775_807
"""The delivery count after XNACK FATAL."""

CANNED = b"""-- KEYS[1]
local real, replies, calls = redis, cjson.decode(ARGV[#ARGV]), 0
ARGV[#ARGV] = nil
local redis = {pcall = real.pcall, call = function(...)
  if (...) == 'XPENDING' and select('#', ...) > 3 then
    calls = calls + 1
    return replies[math.min(calls, #replies)]
  end
  return real.call(...)
end}
redis.pcall = function(...) if (...) == 'XPENDING' then return redis.call(...) end return real.pcall(...) end
"""

Run = Callable[[str, Sequence[bytes], Sequence[bytes], Sequence[Any]], Any]


@pytest.fixture
def broker(redis_server: RedisProcess) -> Any:
    """Entries 1-0 to 9-0, all of them pending."""
    with open_blocking_broker(redis_server.url) as opened:
        opened.create_group("s", "g", start="0")
        for number in range(1, 10):
            opened.xadd("s", {"n": number}, id=f"{number}-0")
        opened.xreadgroup("s", "g", "dead", count=9)
        yield opened


@pytest.fixture(params=["lua", "emulation"])
def run(request: pytest.FixtureRequest, broker: BlockingBroker) -> Run:
    def call(*args: bytes) -> Any:
        return broker.transport.call(Command(args, args[1] if len(args) > 1 else b"s"))

    def lua(name: str, keys: Sequence[bytes], argv: Sequence[bytes], replies: Sequence[Any]) -> Any:
        source = CANNED + script(name).source
        return call(b"EVAL", source, b"%d" % len(keys), *keys, *argv, json.dumps(replies).encode())

    def emulated(name: str, keys: Sequence[bytes], argv: Sequence[bytes], replies: Sequence[Any]) -> Any:
        waiting = [[[row[0].encode(), row[1].encode(), *row[2:]] for row in reply] for reply in replies]

        def canned(*args: bytes) -> Any:
            if args[0] == b"XPENDING" and len(args) > 3:
                return waiting.pop(0) if len(waiting) > 1 else waiting[0]
            return call(*args)

        return emulation(name)(canned, list(keys), list(argv))

    return lua if request.param == "lua" else emulated


def sweep(
    run: Run, replies: Sequence[Any], *, scan: int = 1000, room: int = 100, cursor: bytes = b"0-0"
) -> tuple[bytes, list[bytes], list[int]]:
    argv = (b"g", b"me", b"60000", cursor, b"%d" % scan, b"%d" % room, b"1000000", b"")
    after, taken, gone = run("sweep", (b"s", due_key("s", "g")), argv, replies)
    assert gone == []
    return after, [entry[0] for entry in taken], [entry[2] for entry in taken]


def test_released_entries_are_claimed_at_once(broker: BlockingBroker, run: Run) -> None:
    assert sweep(run, [[*RELEASED, *OWNED]]) == (b"0-0", [b"9-0", b"7-0", b"3-0"], [1, 0, 1])
    mine = broker.xpending_range("s", "g", consumer="me")
    assert [(str(item.id), item.times_delivered) for item in mine] == [("3-0", 1), ("7-0", 1), ("9-0", 1)]


def test_cursor_does_not_pass_owned_entries_because_of_released_ones(run: Run) -> None:
    after, taken, _ = sweep(run, [RELEASED, OWNED[:1]], scan=2)
    assert taken == [b"9-0", b"7-0"]
    assert after == b"0-0", "entries with smaller ids are not examined yet"


def test_released_entries_without_capacity_are_not_passed_by_the_cursor(run: Run) -> None:
    after, taken, _ = sweep(run, [[*RELEASED, *OWNED]], room=1, cursor=b"2-0")
    assert (after, taken) == (b"2-0", [b"9-0"])


def test_cursor_advances_if_no_released_entry_can_be_claimed(broker: BlockingBroker, run: Run) -> None:
    call = broker.transport.call
    for row in RELEASED:  # they wait for redelivery
        call(Command((b"ZADD", due_key("s", "g"), b"9000000000000", row[0].encode()), b"s"))
    after, taken, _ = sweep(run, [RELEASED], scan=2)
    assert (after, taken) == (b"(7-0", [])


def test_fatal_count_stays_a_number(broker: BlockingBroker, run: Run) -> None:
    _, taken, counts = sweep(run, [[["9-0", "", -1, FATAL]]])
    assert (taken, counts) == ([b"9-0"], [2**53 - 1])
    [item] = broker.xpending_range("s", "g", consumer="me")
    assert item.times_delivered == 2**53 - 1


def test_entry_that_is_due_and_was_released_is_redelivered(broker: BlockingBroker, run: Run) -> None:
    broker.transport.call(Command((b"ZADD", due_key("s", "g"), b"1", b"9-0"), b"s"))
    taken, _, gone = run(
        "due_take", (b"s", due_key("s", "g")), (b"g", b"me", b"10", b"1000"), [[["9-0", "", -1, FATAL]]]
    )
    assert [(entry[0], entry[2]) for entry in taken] == [(b"9-0", 2**53)]
    assert gone == []


@pytest.mark.parametrize(("first", "sweeps"), [(RELEASED[:1], 1), (OWNED[1:], 0)])
def test_released_entries_are_a_reason_for_a_visit(run: Run, first: list[Any], sweeps: int) -> None:
    keys = (b"s", due_key("s", "g"), companion_key("s", "later"))
    visits = run("needs_visit", keys, (b"g", b"60000", b"100"), [[], first])
    assert [visit[1] for visit in visits] == [1] * sweeps


def test_released_entries_are_not_deleted(broker: BlockingBroker, run: Run) -> None:
    broker.xack("s", "g", ["8-0", "6-0"])
    keys = (b"s", companion_key("s", "keep"), recreated_key("s", "g"))
    pending = [*RELEASED, *([f"{number}-0", "dead", 1, 1] for number in (1, 2, 3, 4, 5))]
    deleted, length, more, _ = run("delete_acked", keys, (b"", b"2000", b"g"), [pending])
    assert (deleted, length, more) == (2, 7, 0)


def test_operations_read_the_documented_replies() -> None:
    detail = reply(
        b"*2\r\n*4\r\n$3\r\n9-0\r\n$0\r\n\r\n:-1\r\n:1\r\n*4\r\n$3\r\n3-0\r\n$4\r\ndead\r\n:600000\r\n:2\r\n"
    )
    items = result(xpending_range(Context(), "s", "g"), detail)
    assert [(str(item.id), item.consumer, item.idle_ms) for item in items] == [
        ("9-0", "", -1),
        ("3-0", "dead", 600_000),
    ]
    only_released = reply(b"*4\r\n:1\r\n$3\r\n9-0\r\n$3\r\n9-0\r\n*-1\r\n")
    assert result(xpending(Context(), "s", "g"), only_released).consumers == {}


def reply(raw: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(raw)
    return reader.gets()


def result(operation: Any, answer: Any) -> Any:
    next(operation)
    try:
        operation.send(answer)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it asks for more")
