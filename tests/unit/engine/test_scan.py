"""SCAN, HSCAN and SSCAN return every element that exists from the first call to the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driving import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.keyspace import MAX_SCAN_ORDERS


def scan_all(driver: Driver, line: str, count: int, between: Callable[[], None] = lambda: None) -> list[bytes]:
    """``line`` has %s where the cursor goes."""
    cursor, result = b"0", []
    while True:
        cursor, names = driver.say(line % cursor.decode() + f" COUNT {count}")
        result += names
        if cursor == b"0":
            return result
        between()


def test_scan_returns_every_key_once_without_changes() -> None:
    driver = Driver()
    for number in range(500):
        driver.say(f"SET key{number} 1")
    result = scan_all(driver, "SCAN %s", 7)
    assert sorted(result) == sorted(b"key%d" % number for number in range(500))


@settings(deadline=None, max_examples=50)
@given(
    present=st.sets(st.integers(0, 200), min_size=1),
    changes=st.lists(st.tuples(st.booleans(), st.integers(201, 400)), min_size=1, max_size=60),
    count=st.integers(1, 30),
)
def test_scan_returns_every_key_that_exists_throughout(
    present: set[int], changes: list[tuple[bool, int]], count: int
) -> None:
    driver = Driver()
    for number in present:
        driver.say(f"SET key{number} 1")
    remaining = iter(changes)

    def change() -> None:
        for _ in range(3):
            added, number = next(remaining, (False, 0))
            if number:
                driver.say(f"SET key{number} 1" if added else f"DEL key{number}")

    result = scan_all(driver, "SCAN %s", count, change)
    assert {b"key%d" % number for number in present} <= set(result)


def test_scan_continues_after_its_cached_order_was_discarded() -> None:
    driver = Driver()
    for number in range(100):
        driver.say(f"SET key{number} 1")

    def crowd_out() -> None:
        for index in range(1, 1 + MAX_SCAN_ORDERS):
            driver.say(f"SELECT {index % 15 + 1}")
            driver.say("SET a 1")
            driver.say("SET b 1")
            driver.say("SCAN 0 COUNT 1")
        driver.engine.scan_orders._orders.clear()
        driver.say("SELECT 0")

    assert len(set(scan_all(driver, "SCAN %s", 9, crowd_out))) == 100


def test_unused_scan_orders_are_discarded() -> None:
    driver = Driver()
    for number in range(100):
        for member in range(20):
            driver.say(f"SADD set{number} m{member}")
        driver.say(f"SSCAN set{number} 0 COUNT 1")
    assert len(driver.engine.scan_orders._orders) == MAX_SCAN_ORDERS


@pytest.mark.parametrize(
    ("fill", "scan", "width"), [("HSET h f%d v", "HSCAN h %%s", 2), ("SADD h f%d", "SSCAN h %%s", 1)]
)
def test_large_values_are_scanned_in_steps(fill: str, scan: str, width: int) -> None:
    driver = Driver()
    for number in range(600):
        driver.say(fill % number)
    result = scan_all(driver, scan.replace("%%", "%"), 50)
    assert sorted(result[::width]) == sorted(b"f%d" % number for number in range(600))


def test_match_and_type_filter_scanned_keys() -> None:
    driver = Driver()
    driver.say("MSET a1 x a2 x b1 x")
    driver.say("HSET a3 f v")
    assert sorted(scan_all(driver, "SCAN %s MATCH a*", 1)) == [b"a1", b"a2", b"a3"]
    assert scan_all(driver, "SCAN %s TYPE hash", 1) == [b"a3"]


def test_cursor_beyond_the_end_ends_the_scan() -> None:
    driver = Driver()
    driver.say("SET a 1")
    assert driver.say("SCAN 18446744073709551615") == [b"0", []]
    assert driver.error("SCAN 18446744073709551616") == "ERR invalid cursor"
