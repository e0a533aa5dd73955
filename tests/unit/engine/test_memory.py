"""The memory account: an estimate that follows the data, and a limit that rejects commands as Redis does."""

from __future__ import annotations

from driving import Driver

from millstream.engine.info import size_of_key
from millstream.wire.commands import OK

OOM = "OOM command not allowed when used memory > 'maxmemory'."


def test_memory_account_follows_the_data() -> None:
    driver = Driver()
    assert driver.engine.used_memory() == 0
    driver.send((b"SET", b"a", b"x" * 1_000_000))
    used = driver.engine.used_memory()
    assert 1_000_000 < used < 1_001_000
    driver.say("DEL a")
    assert driver.engine.used_memory() == 0


def test_memory_of_many_keys_is_sampled() -> None:
    driver = Driver()
    for number in range(100_000):
        driver.engine.databases[0].values[b"%06d" % number] = b"x" * (number % 100)
    exactly = sum(size_of_key(key, value) for key, value in driver.engine.databases[0].values.items())
    assert abs(driver.engine.used_memory() - exactly) < exactly // 50


def test_incremental_memory_account_equals_a_recount() -> None:
    driver = Driver()
    driver.say("SET before 1")
    driver.say("CONFIG SET maxmemory 1gb")
    for number in range(200):
        driver.say(f"SET k{number % 50} {'v' * number}")
        driver.say(f"HSET h f{number} {'v' * number}")
        driver.say(f"ZADD z {number} m{number}")
        driver.say(f"RPUSH l{number % 3} {number}")
        driver.say(f"SADD s {number}")
        driver.say(f"DEL k{number % 7}")
        driver.engine.used_memory()
    driver.say("SELECT 1")
    driver.say("SET elsewhere 1 PX 5")
    retained = driver.engine.used_memory()
    driver.say("CONFIG SET maxmemory 0")
    assert driver.engine.used_memory() == retained
    driver.say("CONFIG SET maxmemory 1gb")
    driver.pass_time(10)
    driver.say("FLUSHALL")
    assert driver.engine.used_memory() == 0


def test_memory_limit_rejects_only_commands_that_add() -> None:
    driver = Driver()
    driver.send((b"SET", b"a", b"x" * 10_000))
    driver.say("CONFIG SET maxmemory 5000")
    for line in ("SET b 1", "RPUSH l 1", "HSET h f v", "INCR n", "ZADD z 1 a", "SADD s 1", "APPEND a x"):
        assert driver.error(line) == OOM
    assert driver.say("STRLEN a") == 10_000
    assert driver.say("DEL a") == 1
    assert driver.say("SET b 1") == OK
    driver.say("CONFIG SET maxmemory 0")
    assert not driver.main.special


def test_password_applies_to_new_sessions() -> None:
    driver = Driver()
    driver.send((b"SET", b"a", b"x" * 10_000))
    driver.say("CONFIG SET maxmemory 5000")
    assert driver.error("SET b 1", driver.session()) == OOM


def test_memory_usage_reports_one_key() -> None:
    driver = Driver()
    driver.send((b"SET", b"a", b"x" * 1000))
    driver.send((b"RPUSH", b"l", *[b"x" * 100] * 50))
    assert driver.say("MEMORY USAGE nothing") is None
    assert 1000 < driver.say("MEMORY USAGE a") < 1400
    assert 5000 < driver.say("MEMORY USAGE l") < 10_000
    assert driver.say("MEMORY USAGE l SAMPLES 0") == driver.say("MEMORY USAGE l SAMPLES 3")


def test_xadd_after_the_greatest_id_adds_nothing() -> None:
    driver = Driver()
    driver.say("XADD s 1-1 n 1")
    before = driver.engine.used_memory()
    driver.say("XSETID s 18446744073709551615-18446744073709551615")
    assert abs(driver.engine.used_memory() - before) < 100
    assert "exhausted" in str(driver.say("XADD s * n 2"))
    driver.say("XSETID s 1-1")
    assert abs(driver.engine.used_memory() - before) < 100
    driver.say("XADD s * n 2")
    assert driver.say("XLEN s") == 2


def test_memory_limit_does_not_interrupt_a_started_command() -> None:
    """A script, and scripts in a transaction: all of it is refused, or all of it runs."""
    source = b"return redis.call('SET', KEYS[1], ARGV[1])"
    driver = Driver()
    driver.engine.register_script(source, lambda call, keys, argv: call(b"SET", keys[0], argv[0]))
    evaluate = (b"EVAL", source, b"1", b"b", b"y")
    driver.say("CONFIG SET maxmemory 1000")
    driver.say("MULTI")
    driver.send((b"SET", b"a", b"x" * 2000))
    driver.send(evaluate)
    assert driver.say("EXEC") == [OK, OK]
    assert OOM in str(driver.send(evaluate))
    driver.say("DEL a")
    assert driver.send(evaluate) == OK
