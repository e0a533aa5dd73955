"""Keys are deleted when they expire, with or without access, and with notifications."""

from __future__ import annotations

from driving import START_MS, Driver

from millstream.wire.commands import NIL_ARRAY, Push


def test_key_exists_until_the_end_of_its_expiry_millisecond() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.now_ms += 100
    assert driver.say("GET a") == b"1"
    assert driver.say("PTTL a") == 0
    driver.now_ms += 1
    assert driver.say("GET a") is None
    assert driver.say("PTTL a") == -2


def test_tick_removes_expired_keys() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    assert driver.engine.due_in_ms(START_MS) == 101
    driver.pass_time(101)
    assert driver.say("DBSIZE") == 0
    assert driver.engine.due_in_ms(driver.now_ms) is None
    assert driver.engine.stats.expired_keys == 1


def test_renewed_key_outlives_its_first_expiry() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("PEXPIRE a 500")
    driver.pass_time(200)
    assert driver.say("EXISTS a") == 1
    driver.say("PERSIST a")
    driver.pass_time(1000)
    assert driver.say("EXISTS a") == 1


def test_set_removes_the_expiry() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("SET a 2")
    driver.pass_time(200)
    assert driver.say("GET a") == b"2"


def test_keepttl_keeps_the_expiry() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("SET a 2 KEEPTTL")
    assert driver.say("PTTL a") == 100


def test_renamed_key_keeps_its_expiry() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("RENAME a b")
    driver.pass_time(101)
    assert driver.say("DBSIZE") == 0


def test_one_tick_does_a_bounded_amount_of_work() -> None:
    driver = Driver()
    for number in range(1200):
        driver.say(f"SET key{number} 1 PX 1")
    driver.pass_time(2)
    assert driver.say("DBSIZE") == 700
    assert driver.engine.due_in_ms(driver.now_ms) == 0
    driver.engine.tick(driver.now_ms)
    driver.engine.tick(driver.now_ms)
    assert driver.say("DBSIZE") == 0


def test_repeated_renewals_do_not_grow_the_expiry_schedule() -> None:
    driver = Driver()
    for _ in range(10_000):
        driver.say("SET lease me PX 5000")
        driver.now_ms += 1
    assert len(driver.engine.expiry._heap) <= 1025


def test_nothing_expires_while_a_journal_is_loaded() -> None:
    driver = Driver()
    driver.engine.loading = True
    driver.say("SET a 1 PXAT 1")
    driver.pass_time(1)
    assert driver.say("GET a") == b"1"
    driver.engine.loading = False
    assert driver.say("GET a") is None


def test_expiry_is_published_to_listeners() -> None:
    driver = Driver()
    listener = driver.session()
    driver.say("CONFIG SET notify-keyspace-events Ex")
    driver.say("SUBSCRIBE __keyevent@0__:expired", listener)
    driver.say("SET a 1 PX 10")
    driver.pass_time(11)
    assert driver.heard(listener) == [Push([b"message", b"__keyevent@0__:expired", b"a"])]


def test_expired_key_aborts_watching_transactions() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 10")
    driver.say("WATCH a")
    driver.say("MULTI")
    driver.now_ms += 11
    assert driver.say("EXEC") is NIL_ARRAY


def test_expiry_before_watch_is_not_a_change() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 10")
    driver.now_ms += 11
    driver.say("WATCH a")
    driver.say("MULTI")
    driver.now_ms += 1
    driver.engine.tick(driver.now_ms)
    assert driver.say("EXEC") == []


def test_keys_and_randomkey_omit_expired_keys() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 10")
    driver.say("SET b 1")
    driver.now_ms += 11
    assert driver.say("KEYS *") == [b"b"]
    assert {driver.say("RANDOMKEY") for _ in range(20)} == {b"b"}
    driver.say("DEL b")
    assert driver.say("RANDOMKEY") is None


def test_ttl_rounds_to_the_nearest_second() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 1499")
    assert driver.say("TTL a") == 1
    driver.say("SET a 1 PX 1500")
    assert driver.say("TTL a") == 2
    driver.say("SET a 1 PXAT 5499")
    assert driver.engine.databases[0].expires[b"a"] == 5499
