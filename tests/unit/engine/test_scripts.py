"""EVALSHA runs the emulation of a script atomically, and replies as Redis does for an unknown script."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from driving import Driver, wait_for_list

from millstream.engine.commands.transactions import Call
from millstream.engine.session import BLOCKED
from millstream.wire.commands import NIL_ARRAY, ErrorReply

SOURCE = b"return redis.call('SET', KEYS[1], ARGV[1])"


def set_twice(call: Call, keys: list[bytes], argv: list[bytes]) -> Any:
    call(b"SET", keys[0], argv[0])
    call(b"RPUSH", keys[1], *argv)
    return [len(keys), call(b"GET", keys[0])]


@pytest.fixture
def driver() -> Driver:
    driver = Driver(recording=True)
    driver.engine.register_script(SOURCE, set_twice)
    return driver


def sha(driver: Driver) -> bytes:
    return driver.send((b"SCRIPT", b"LOAD", SOURCE))


def test_emulation_replies_for_its_script(driver: Driver) -> None:
    assert driver.send((b"EVALSHA", sha(driver), b"2", b"a", b"b", b"x", b"y")) == [2, b"x"]
    assert driver.send((b"EVAL", SOURCE, b"2", b"a", b"c", b"z")) == [2, b"z"]
    assert driver.send((b"EVALSHA", sha(driver).upper(), b"2", b"a", b"c", b"z")) == [2, b"z"]


def test_effects_of_a_script_are_one_unit(driver: Driver) -> None:
    driver.send((b"EVALSHA", sha(driver), b"2", b"a", b"b", b"x"))
    assert driver.engine.take_units() == [[(0, (b"SET", b"a", b"x")), (0, (b"RPUSH", b"b", b"x"))]]


def test_blocked_reader_is_served_after_the_command(driver: Driver) -> None:
    driver.add_command(b"WAITPOP", wait_for_list)
    reader = driver.session()
    driver.say("WAITPOP b 0", reader)
    driver.send((b"EVALSHA", sha(driver), b"2", b"a", b"b", b"x"))
    assert driver.heard(reader) == [[b"b", b"x"]]
    assert len(driver.engine.take_units()) == 2


def test_unknown_script_is_rejected_with_a_reason(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lupa", None)  # as where the extra is not installed
    monkeypatch.setitem(sys.modules, "lupa.lua51", None)
    for line in ("EVAL return 0", "SCRIPT LOAD return"):
        text = driver.error(line)
        assert text.startswith("ERR millstream's embedded server runs only its own scripts")
        assert "real Redis" in text


def test_unknown_sha_returns_noscript(driver: Driver) -> None:
    assert driver.error("EVALSHA " + "f" * 40 + " 0") == "NOSCRIPT No matching script. Please use EVAL."


def test_flushed_scripts_must_be_loaded_again(driver: Driver) -> None:
    loaded = sha(driver)
    assert driver.send((b"SCRIPT", b"EXISTS", loaded, b"f" * 40)) == [1, 0]
    driver.say("SCRIPT FLUSH")
    assert driver.send((b"SCRIPT", b"EXISTS", loaded)) == [0]
    assert driver.send((b"EVALSHA", loaded, b"0")) == ErrorReply("NOSCRIPT No matching script. Please use EVAL.")
    assert sha(driver) == loaded
    assert driver.send((b"SCRIPT", b"EXISTS", loaded.upper())) == [1]


def test_error_ends_a_script_without_rollback(driver: Driver) -> None:
    def fails(call: Call, keys: list[bytes], argv: list[bytes]) -> Any:
        call(b"SET", b"a", b"text")
        call(b"INCR", b"a")
        return call(b"SET", b"b", b"never")

    name = driver.engine.register_script(b"fails", fails)
    assert driver.send((b"EVALSHA", name, b"0")) == ErrorReply("ERR value is not an integer or out of range")
    assert driver.say("GET a") == b"text"
    assert driver.say("EXISTS b") == 0


def test_script_can_catch_an_error(driver: Driver) -> None:
    def catches(call: Call, keys: list[bytes], argv: list[bytes]) -> Any:
        try:
            return call(b"INCR", b"a")
        except ErrorReply as error:
            return error.text.encode()

    driver.say("SET a text")
    name = driver.engine.register_script(b"catches", catches)
    assert driver.send((b"EVALSHA", name, b"0")) == b"ERR value is not an integer or out of range"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((b"MULTI",), "ERR This Redis command is not allowed from script"),
        ((b"SUBSCRIBE", b"a"), "ERR This Redis command is not allowed from script"),
        ((b"GET",), "ERR Wrong number of args calling Redis command from script"),
        ((b"NOSUCH",), "ERR Unknown Redis command called from script"),
        ((b"CLIENT", b"NOSUCH"), "ERR Unknown Redis command called from script"),
    ],
)
def test_forbidden_commands_fail_in_scripts(driver: Driver, words: tuple[bytes, ...], text: str) -> None:
    name = driver.engine.register_script(b"calls", lambda call, keys, argv: call(*words))
    assert driver.send((b"EVALSHA", name, b"0")) == ErrorReply(text)


def test_nothing_waits_inside_a_script(driver: Driver) -> None:
    driver.add_command(b"WAITPOP", wait_for_list)
    name = driver.engine.register_script(b"waits", lambda call, keys, argv: call(b"WAITPOP", b"a", b"0"))
    reply = driver.send((b"EVALSHA", name, b"0"))
    assert reply is not BLOCKED
    assert reply is NIL_ARRAY


def test_select_in_a_script_ends_with_the_script(driver: Driver) -> None:
    def selects(call: Call, keys: list[bytes], argv: list[bytes]) -> Any:
        call(b"SELECT", b"5")
        return call(b"SET", b"a", b"in five")

    name = driver.engine.register_script(b"selects", selects)
    driver.send((b"EVALSHA", name, b"0"))
    assert driver.say("EXISTS a") == 0
    driver.say("SELECT 5")
    assert driver.say("GET a") == b"in five"


def test_script_is_stopped_at_the_memory_limit(driver: Driver) -> None:
    driver.say("SET big value")
    driver.say("CONFIG SET maxmemory 1")
    reply = driver.send((b"EVALSHA", sha(driver), b"2", b"a", b"b", b"x"))
    assert reply == ErrorReply("OOM command not allowed when used memory > 'maxmemory'.")
