"""A stream against a simple model: a sorted list of entries."""

from __future__ import annotations

import random
from typing import Any

import pytest
from driving import START_MS, Driver

from millstream.engine.stream.sealed import pack, unpack

Model = list[tuple[tuple[int, int], list[bytes]]]


def entry_id(raw: bytes) -> tuple[int, int]:
    ms, _, seq = raw.partition(b"-")
    return int(ms), int(seq)


def raw_id(pair: tuple[int, int]) -> bytes:
    return b"%d-%d" % pair


def as_replies(model: Model) -> list[Any]:
    return [[raw_id(item), words] for item, words in model]


def random_fields(chance: random.Random) -> list[bytes]:
    names = chance.choice([[b"f"], [b"f"], [b"f"], [b"f", b"g"], [b"g", b"f"], [b"x", b"y", b"z"]])
    sizes = chance.choice([(0, 10), (60, 70), (85, 85), (1000, 2000)])
    return [word for name in names for word in (name, chance.randbytes(chance.randint(*sizes)))]


@pytest.mark.parametrize("seed", range(12))
def test_sorted_set_behaves_like_a_sorted_list(seed: int) -> None:
    chance = random.Random(seed)
    driver = Driver()
    model: Model = []
    for step in range(1500):
        draw = chance.random()
        if draw < 0.8:
            driver.now_ms += chance.choice([0, 0, 0, 1, 1000, -3])
            words = random_fields(chance)
            added = entry_id(driver.send((b"XADD", b"s", b"*", *words)))
            assert not model or added > model[-1][0]
            model.append((added, words))
        elif draw < 0.9 and model:
            ends = chance.choice([model[:30], model[-30:], model])
            gone = chance.sample(ends, min(len(ends), chance.choice([1, 20])))
            assert driver.send((b"XDEL", b"s", *(raw_id(item) for item, _ in gone), b"1-1")) == len(gone)
            model = [entry for entry in model if entry not in gone]
        elif draw < 0.93:
            keep = chance.randrange(len(model) + 5) if chance.random() < 0.9 else 0
            deleted = max(len(model) - keep, 0)
            assert driver.send((b"XTRIM", b"s", b"MAXLEN", b"%d" % keep)) == deleted
            model = model[deleted:]
        elif draw < 0.95 and model:
            first, _ = chance.choice(model)
            before = [entry for entry in model if entry[0] < first]
            assert driver.send((b"XTRIM", b"s", b"MINID", b"=", raw_id(first))) == len(before)
            model = model[len(before) :]
        elif model:
            check_range(driver, chance, model)
        if step % 100 == 0:
            assert driver.say("XLEN s") == len(model)
            assert driver.say("XRANGE s - +") == as_replies(model)
            assert driver.say("XREVRANGE s + -") == as_replies(model)[::-1]


def check_range(driver: Driver, chance: random.Random, model: Model) -> None:
    bounds = []
    for _ in range(2):
        ms, seq = chance.choice(model)[0]
        bounds.append((max(ms + chance.choice([0, 0, -1, 1]), 0), max(seq + chance.choice([0, 0, -1, 1]), 0)))
    low, high = sorted(bounds)
    count = chance.choice([None, 1, 5, 100])
    inside = [entry for entry in model if low <= entry[0] <= high]
    option = b"" if count is None else b" COUNT %d" % count
    line = b"XRANGE s %s %s%s" % (raw_id(low), raw_id(high), option)
    assert driver.send(tuple(line.split())) == as_replies(inside[:count])
    line = b"XREVRANGE s %s %s%s" % (raw_id(high), raw_id(low), option)
    assert driver.send(tuple(line.split())) == as_replies(inside[::-1][:count])
    line = b"XRANGE s (%s (%s%s" % (raw_id(low), raw_id(high), option)
    strictly = [entry for entry in inside if entry[0] not in (low, high)]
    expected = [] if low == high else as_replies(strictly[:count])
    assert driver.send(tuple(line.split())) == expected


def test_ids_increase_if_the_clock_is_set_back() -> None:
    driver = Driver()
    assert driver.say("XADD s * f v") == b"%d-0" % START_MS
    driver.now_ms -= 10_000
    assert driver.say("XADD s * f v") == b"%d-1" % START_MS
    driver.now_ms += 10_001
    assert driver.say("XADD s * f v") == b"%d-0" % (START_MS + 1)


def test_greatest_sequence_number_is_followed_by_the_next_millisecond() -> None:
    driver = Driver()
    driver.say(f"XADD s {START_MS}-18446744073709551615 f v")
    assert driver.say("XADD s * f v") == b"%d-0" % (START_MS + 1)
    assert driver.say("XADD s * f v g w") == b"%d-1" % (START_MS + 1)


def test_exhausted_stream_rejects_entries() -> None:
    driver = Driver()
    driver.say("XADD s 18446744073709551615-18446744073709551615 f v")
    for line in ("XADD s * f v", "XADD s * f v g w", "XADD s 1-1 f v"):
        assert "exhausted the last possible ID" in driver.say(line).text
    assert driver.say("XLEN s") == 1


def test_returned_values_are_not_changed_later() -> None:
    """Replies are the client's own: later commands must not reach into them."""
    driver = Driver()
    driver.say("XADD s 1-1 f v")
    reply = driver.say("XRANGE s - +")
    reply[0][1].append(b"changed")
    assert driver.say("XRANGE s - +") == [[b"1-1", [b"f", b"v"]]]


def test_last_node_accepts_entries_after_later_nodes_are_deleted() -> None:
    driver = Driver()
    driver.say("CONFIG SET stream-node-max-entries 3")
    for number in range(1, 8):
        driver.say(f"XADD s {number}-1 f v{number}")
    driver.say("XDEL s 5-1 7-1")
    driver.say("CONFIG SET stream-node-max-entries 4")
    assert driver.say("XINFO STREAM s")[3] == 2
    driver.say("XADD s 8-1 f v8")
    assert driver.say("XINFO STREAM s")[3] == 2
    driver.say("XADD s 9-1 f v9")
    assert driver.say("XINFO STREAM s")[3] == 3
    assert [entry[0] for entry in driver.say("XRANGE s - +")] == [
        b"1-1",
        b"2-1",
        b"3-1",
        b"4-1",
        b"6-1",
        b"8-1",
        b"9-1",
    ]


def test_lower_last_id_after_deletions_keeps_order() -> None:
    driver = Driver()
    for number in (2, 4, 6, 8):
        driver.say(f"XADD s {number}-0 f v")
    driver.say("XDEL s 6-0 8-0")
    driver.say("XSETID s 5-0")
    for number in (6, 7):
        assert driver.say(f"XADD s {number}-0 f new") == b"%d-0" % number
    assert [entry[0] for entry in driver.say("XRANGE s 3 +")] == [b"4-0", b"6-0", b"7-0"]
    assert driver.say("XDEL s 6-0 8-0") == 1


def test_lower_last_id_before_the_only_node_keeps_entries_reachable() -> None:
    driver = Driver()
    driver.say("CONFIG SET stream-node-max-entries 2")
    for number in (7, 9):
        driver.say(f"XADD s {number}-0 f v")
    driver.say("XDEL s 9-0")
    driver.say("XTRIM s MINID 8-0")
    assert driver.say("XINFO STREAM s")[:4] == [b"length", 0, b"radix-tree-keys", 1]
    driver.say("XSETID s 1-0")
    for number in (2, 3, 4, 5):
        assert driver.say(f"XADD s {number}-0 f v") == b"%d-0" % number
    assert [entry[0] for entry in driver.say("XRANGE s 2 +")] == [b"2-0", b"3-0", b"4-0", b"5-0"]
    assert driver.say("XDEL s 2-0 5-0") == 2


def test_memory_account_follows_stored_values() -> None:
    driver = Driver()
    usage = []
    for _ in range(3):
        for _ in range(1000):
            driver.send((b"XADD", b"s", b"*", b"f", b"x" * 85))
        usage.append(driver.say("MEMORY USAGE s"))
    assert 85_000 < usage[0] < 200_000
    assert usage[0] < usage[1] < usage[2]
    driver.say("XTRIM s MAXLEN 0")
    assert driver.say("MEMORY USAGE s") < 2_000
    driver.say("XGROUP CREATE s g 0")
    for _ in range(100):
        driver.say("XADD s * f v")
    before = driver.say("MEMORY USAGE s")
    driver.say("XREADGROUP GROUP g c STREAMS s >")
    assert driver.say("MEMORY USAGE s") > before + 5_000


@pytest.mark.parametrize("greatest", [0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1])
def test_packed_numbers_are_decoded(greatest: int) -> None:
    numbers = [0, greatest // 2, greatest]
    assert list(unpack(pack(numbers), 3)) == numbers
