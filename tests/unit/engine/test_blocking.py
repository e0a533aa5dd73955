"""Blocking commands: who waits, who is served first, and how a wait ends."""

from __future__ import annotations

import pytest
from driving import START_MS, Driver, wait_for_list

from millstream.engine.session import BLOCKED, Block
from millstream.wire.commands import NIL_ARRAY, ErrorReply


@pytest.fixture
def driver() -> Driver:
    driver = Driver(recording=True)
    driver.add_command(b"WAITPOP", wait_for_list)
    return driver


def test_blocking_read_returns_existing_entries_at_once(driver: Driver) -> None:
    driver.say("RPUSH a 1")
    assert driver.say("WAITPOP a 0") == [b"a", b"1"]


def test_blocked_readers_are_served_in_order_of_arrival(driver: Driver) -> None:
    first, second, third = driver.session(), driver.session(), driver.session()
    for session in (first, second, third):
        assert driver.say("WAITPOP a 0", session) is BLOCKED
    driver.say("RPUSH a 1 2")
    assert driver.engine.take_outbox() == [(first, [b"a", b"1"]), (second, [b"a", b"2"])]
    assert third.blocked is not None
    assert first.blocked is None


def test_first_written_key_is_served_first(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a b 0", reader)
    driver.say("MULTI")
    driver.say("RPUSH b 1")
    driver.say("RPUSH a 2")
    driver.say("EXEC")
    assert driver.heard(reader) == [[b"b", b"1"]]


def test_readers_are_served_after_a_transaction(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    driver.say("MULTI")
    driver.say("RPUSH a 1")
    driver.say("DEL a")
    driver.say("EXEC")
    assert driver.heard(reader) == []
    assert reader.blocked is not None


def test_blocking_command_in_a_transaction_does_not_block(driver: Driver) -> None:
    driver.say("MULTI")
    driver.say("WAITPOP a 0")
    assert driver.say("EXEC") == [NIL_ARRAY]
    assert len(driver.engine.waiting) == 0


def test_key_of_another_type_returns_wrongtype(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    driver.say("SET a 1")
    (reply,) = driver.heard(reader)
    assert isinstance(reply, ErrorReply)
    assert reply.text.startswith("WRONGTYPE")


def test_wait_ends_at_its_deadline(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 100", reader)
    assert driver.engine.due_in_ms(START_MS) == 100
    driver.pass_time(99)
    assert driver.heard(reader) == []
    driver.pass_time(1)
    assert driver.heard(reader) == [NIL_ARRAY]
    assert driver.engine.due_in_ms(driver.now_ms) is None
    driver.say("RPUSH a 1")
    assert driver.heard(reader) == []


def test_deadlines_come_in_their_order(driver: Driver) -> None:
    late, early = driver.session(), driver.session()
    driver.say("WAITPOP a 200", late)
    driver.say("WAITPOP a 100", early)
    driver.pass_time(300)
    assert [session for session, _ in driver.engine.take_outbox()] == [early, late]


def test_cancelled_wait_is_removed(driver: Driver) -> None:
    reader, other = driver.session(), driver.session()
    driver.say("WAITPOP a b 100", reader)
    driver.say("WAITPOP a 0", other)
    assert driver.engine.cancel(reader)
    assert not driver.engine.cancel(reader)
    driver.say("RPUSH a 1")
    assert driver.engine.take_outbox() == [(other, [b"a", b"1"])]
    assert driver.engine.databases[0].blocked == {}
    assert driver.engine.due_in_ms(driver.now_ms) is None


def test_closed_session_does_not_receive_entries(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    driver.engine.drop(reader)
    driver.engine.drop(reader)
    driver.say("RPUSH a 1")
    assert driver.engine.take_outbox() == []
    assert driver.say("LLEN a") == 1


def test_blocking_read_waits_in_its_selected_database(driver: Driver) -> None:
    reader = driver.session()
    driver.say("SELECT 3", reader)
    driver.say("WAITPOP a 0", reader)
    driver.say("RPUSH a 1")
    assert driver.heard(reader) == []
    driver.say("SELECT 3")
    driver.say("RPUSH a 2")
    assert driver.heard(reader) == [[b"a", b"2"]]


def test_client_unblock_ends_a_wait(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    assert driver.say(f"CLIENT UNBLOCK {reader.id} ERROR") == 1
    assert driver.heard(reader) == [ErrorReply("UNBLOCKED client unblocked via CLIENT UNBLOCK")]
    assert driver.say(f"CLIENT UNBLOCK {reader.id}") == 0
    driver.say("WAITPOP a 0", reader)
    assert driver.say(f"CLIENT UNBLOCK {reader.id} TIMEOUT") == 1
    assert driver.heard(reader) == [NIL_ARRAY]


def test_serving_a_reader_is_a_separate_unit(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    driver.say("RPUSH a 1")
    assert driver.engine.take_units() == [[(0, (b"RPUSH", b"a", b"1"))], [(0, (b"LPOP", b"a"))]]


def test_reader_that_becomes_ready_while_serving_is_served(driver: Driver) -> None:
    """A served reader that thereby changes another key wakes the readers of that key."""
    chained, last = driver.session(), driver.session()

    def move(session, args):
        inner = wait_for_list(session, [b"WAITPOP", b"a", b"0"])

        def serve(key: bytes):
            reply = inner.serve(key)
            if reply is not None:
                session.engine.call(session, session.engine.table.fast[b"RPUSH"], (b"RPUSH", b"b", reply[1]))
            return reply

        return Block(inner.keys, inner.wait_ms, serve)

    driver.add_command(b"MOVE1", move)
    driver.say("MOVE1", chained)
    driver.say("WAITPOP b 0", last)
    driver.say("RPUSH a 7")
    assert driver.engine.take_outbox() == [(chained, [b"a", b"7"]), (last, [b"b", b"7"])]


def test_flush_wakes_readers_of_deleted_keys(driver: Driver) -> None:
    asked: list[bytes] = []

    def watchful(session, args):
        return Block([b"there", b"not"], None, lambda key: asked.append(key))

    driver.add_command(b"WATCHFUL", watchful)
    driver.say("SET there 1")
    driver.say("WATCHFUL", driver.session())
    driver.say("FLUSHALL")
    assert asked == [b"there"]


def test_blocked_clients_are_counted(driver: Driver) -> None:
    reader = driver.session()
    driver.say("WAITPOP a 0", reader)
    assert b"blocked_clients:1\r\n" in driver.say("INFO clients")
    driver.engine.cancel(reader)
    assert b"blocked_clients:0\r\n" in driver.say("INFO clients")


def test_ended_waits_leave_no_deadlines(driver: Driver) -> None:
    reader = driver.session()
    for _ in range(500):
        driver.say("WAITPOP a 60000", reader)
        driver.engine.cancel(reader)
    assert len(driver.engine.waiting._deadlines) < 100
