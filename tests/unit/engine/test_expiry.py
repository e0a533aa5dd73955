"""Keys go when their time is over: seen or unseen, and with everybody told."""

from __future__ import annotations

from driving import START_MS, Driver

from millstream.wire.commands import NIL_ARRAY, Push


def test_a_key_lives_through_its_last_millisecond() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.now_ms += 100
    assert driver.say("GET a") == b"1"
    assert driver.say("PTTL a") == 0
    driver.now_ms += 1
    assert driver.say("GET a") is None
    assert driver.say("PTTL a") == -2


def test_tick_removes_what_nobody_looks_at() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    assert driver.engine.due_in_ms(START_MS) == 101
    driver.pass_time(101)
    assert driver.say("DBSIZE") == 0
    assert driver.engine.due_in_ms(driver.now_ms) is None
    assert driver.engine.stats.expired_keys == 1


def test_a_renewed_key_outlives_its_first_time() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("PEXPIRE a 500")
    driver.pass_time(200)
    assert driver.say("EXISTS a") == 1
    driver.say("PERSIST a")
    driver.pass_time(1000)
    assert driver.say("EXISTS a") == 1


def test_setting_a_key_anew_forgets_its_time() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("SET a 2")
    driver.pass_time(200)
    assert driver.say("GET a") == b"2"


def test_keepttl_keeps_it() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 100")
    driver.say("SET a 2 KEEPTTL")
    assert driver.say("PTTL a") == 100


def test_a_renamed_key_takes_its_time_along() -> None:
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


def test_leases_that_are_renewed_for_ever_do_not_grow_the_schedule() -> None:
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


def test_listeners_hear_of_it() -> None:
    driver = Driver()
    listener = driver.session()
    driver.say("CONFIG SET notify-keyspace-events Ex")
    driver.say("SUBSCRIBE __keyevent@0__:expired", listener)
    driver.say("SET a 1 PX 10")
    driver.pass_time(11)
    assert driver.heard(listener) == [Push([b"message", b"__keyevent@0__:expired", b"a"])]


def test_an_expired_key_is_a_changed_key_for_those_who_watch_it() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 10")
    driver.say("WATCH a")
    driver.say("MULTI")
    driver.now_ms += 11
    assert driver.say("EXEC") is NIL_ARRAY


def test_a_key_that_was_over_before_it_was_watched_is_not_changed_by_going() -> None:
    driver = Driver()
    driver.say("SET a 1 PX 10")
    driver.now_ms += 11
    driver.say("WATCH a")
    driver.say("MULTI")
    driver.now_ms += 1
    driver.engine.tick(driver.now_ms)
    assert driver.say("EXEC") == []


def test_keys_and_randomkey_do_not_show_what_is_over() -> None:
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
