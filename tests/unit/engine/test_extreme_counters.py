"""Counters and ids at the limits of 64 bits, or set back by XSETID: valid replies, and a journal that replays."""

from __future__ import annotations

import pytest

from millstream.engine.effects import effects_of_key
from millstream.engine.stream import dump
from millstream.wire import ErrorReply
from tests.unit.engine.driving import Driver

MAX = 2**63 - 1
HISTORIES = {
    "delivery count": [
        "XADD s 1-1 f v",
        "XGROUP CREATE s g 0",
        "XREADGROUP GROUP g c STREAMS s >",
        f"XCLAIM s g c 0 1-1 RETRYCOUNT {MAX}",
        "XCLAIM s g c 0 1-1",
        "XAUTOCLAIM s g c 0 0",
        "XREADGROUP GROUP g c STREAMS s 0",
    ],
    "entries added": ["XADD s 1-1 f v", f"XSETID s 1-1 ENTRIESADDED {MAX} MAXDELETEDID 0-0", "XADD s 2-1 f v"],
    "entries read": [
        "XADD s 1-1 f v",
        "XADD s 2-1 f v",
        f"XGROUP CREATE s g 0 ENTRIESREAD {MAX}",
        "XREADGROUP GROUP g c COUNT 1 STREAMS s >",
        "XREADGROUP GROUP g c STREAMS s >",
    ],
    "last id before a deleted entry": ["XADD s 9-1 f v", "XADD s 10-1 f v", "XDEL s 10-1", "XSETID s 9-1"],
    "last id before a deleted pending entry": [
        "XADD s 9-1 f v",
        "XADD s 10-1 f v",
        "XGROUP CREATE s g 0",
        "XREADGROUP GROUP g c STREAMS s >",
        "XDEL s 10-1",
        "XSETID s 9-1",
    ],
    "last id of an empty stream set to zero": ["XADD s 9-1 f v", "XDEL s 9-1", "XSETID s 0-0"],
}
histories = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())


def run(history: list[str]) -> Driver:
    driver = Driver(recording=True)
    for line in history:
        reply = driver.say(line)
        assert not isinstance(reply, ErrorReply), (line, reply)
    return driver


def replayed(effects: object) -> Driver:
    driver = Driver()
    driver.engine.loading = True
    for args in effects:  # type: ignore[attr-defined]
        reply = driver.send(args)
        assert not isinstance(reply, ErrorReply), (args, reply)
    return driver


def numbers(reply: object) -> list[int]:
    if isinstance(reply, dict):
        return numbers([*reply.values()])
    if isinstance(reply, list):
        return [number for item in reply for number in numbers(item)]
    return [reply] if isinstance(reply, int) else []


@histories
def test_every_number_in_replies_has_64_bits(history: list[str]) -> None:
    driver = run(history)
    for line in ("XINFO STREAM s FULL", "XINFO GROUPS s", "XPENDING s g - + 10"):
        assert all(-(2**63) <= number < 2**63 for number in numbers(driver.say(line)))


@histories
def test_recorded_effects_can_be_replayed(history: list[str]) -> None:
    driver = run(history)
    again = replayed(args for unit in driver.engine.take_units() for _, args in unit)
    assert again.say("XINFO STREAM s FULL") == driver.say("XINFO STREAM s FULL")


@histories
def test_rewritten_effects_can_be_replayed(history: list[str]) -> None:
    driver = run(history)
    once = replayed(effects_of_key(driver.main.db, b"s"))
    twice = replayed(effects_of_key(once.main.db, b"s"))
    assert twice.say("XINFO STREAM s FULL") == once.say("XINFO STREAM s FULL") == driver.say("XINFO STREAM s FULL")


@histories
def test_copy_and_restored_dump_equal_the_stream(history: list[str]) -> None:
    driver = run(history)
    assert driver.say("COPY s t") == 1
    assert driver.send([b"RESTORE", b"u", b"0", driver.say("DUMP s")]) == b"OK"
    original = driver.say("XINFO STREAM s FULL")
    for key in ("t", "u"):
        assert driver.say(f"XINFO STREAM {key} FULL") == original


def test_entry_added_after_the_last_id_was_set_back_is_copied() -> None:
    driver = run(["XADD s 9-1 f a", "XADD s 10-1 f b", "XDEL s 10-1", "XSETID s 9-1", "XADD s 9-2 f c", "COPY s t"])
    assert driver.say("XRANGE t - +") == [[b"9-1", [b"f", b"a"]], [b"9-2", [b"f", b"c"]]]
    assert driver.say("XDEL t 9-1 9-2") == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda stream: setattr(stream, "entries_added", 1),
        lambda stream: setattr(stream, "_removed", 2**63),
        lambda stream: setattr(stream.groups[b"g"], "entries_read", 2**63 + 7),
        lambda stream: stream.groups[b"g"].assign(1 << 64 | 1, (stream.groups[b"g"].consumers[b"c"], 5, 2**63)),
        lambda stream: stream.groups[b"g"].assign(0, (stream.groups[b"g"].consumers[b"c"], 5, 1)),
    ],
    ids=["added less than exist", "added", "read", "delivery count", "pending entry 0-0"],
)
def test_payload_with_an_impossible_counter_is_not_restored(damage, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = run(["XADD s 1-1 f v", "XADD s 2-1 f v", "XGROUP CREATE s g 0", "XREADGROUP GROUP g c STREAMS s >"])
    stream = driver.main.db.find(b"s")
    monkeypatch.setattr(type(stream), "entries_added", property(unlimited_entries_added, set_entries_added))
    damage(stream)
    payload = dump.dump(stream)
    monkeypatch.undo()
    reply = driver.send([b"RESTORE", b"t", b"0", payload])
    assert isinstance(reply, ErrorReply)
    assert driver.say("EXISTS t") == 0


def unlimited_entries_added(stream) -> int:
    return stream.length + stream._removed


def set_entries_added(stream, count: int) -> None:
    stream._removed = count - stream.length
