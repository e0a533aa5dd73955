"""Notes of gaps from tasks to the driver, and the sink's account of losses: on redis-server and on our own server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker import retention
from millstream.model import TrimPolicy
from millstream.spark.data_loss import KEPT_MS, forget, new_book, note, noted
from millstream.spark.fan_out import cap
from millstream.testing.answering import ANSWER_LOST, AnsweringProxy, ProxyAnswer, Request
from millstream.testing.topologies import say


@pytest.fixture(params=["redis_server", "millstream_server"])
def broker(request: pytest.FixtureRequest) -> Iterator[BlockingBroker]:
    with open_blocking_broker(request.getfixturevalue(request.param).url) as opened:
        yield opened


def test_notes_reach_the_driver_once_and_end_by_themselves(broker):
    book = new_book(["orders"])
    assert book is not None
    assert noted(broker, book) == {}
    note(broker, book, "orders", None)
    note(broker, book, "orders", 12)
    note(broker, book, "orders", None)
    note(broker, book, "caf\udce9", None)
    assert 0 < say(broker, "PTTL", book.decode()) <= KEPT_MS
    assert noted(broker, book) == {"orders": 12, "caf\udce9": None}
    forget(broker, book)
    assert noted(broker, book) == {}


def test_notes_outlive_every_answer_that_is_lost(redis_server):
    """The driver asks again by itself: an answer that nobody heard must not have been the only one."""
    lost: list[bytes] = []

    def each_name_once(request: Request) -> ProxyAnswer | None:
        if request.opening or request.name in lost:
            return None
        lost.append(request.name)
        return ANSWER_LOST

    book = new_book(["orders"])
    assert book is not None
    with open_blocking_broker(redis_server.url) as task:
        note(task, book, "orders", 12)
        with (
            AnsweringProxy(redis_server.port, each_name_once) as proxy,
            open_blocking_broker(f"redis://127.0.0.1:{proxy.port}") as driver,
        ):
            assert noted(driver, book) == {"orders": 12}
            forget(driver, book)
        assert lost, "no answer was lost"
        assert noted(task, book) == {}


def test_a_driver_that_may_only_read_hears_the_notes_and_leaves_them_to_their_end(redis_server):
    book = new_book(["orders"])
    assert book is not None
    with open_blocking_broker(redis_server.url) as task:
        note(task, book, "orders", 12)
        say(task, "ACL", "SETUSER", "onlooker", "on", "nopass", "~*", "+@read", "+@connection")
        try:
            with open_blocking_broker(f"redis://onlooker:any@127.0.0.1:{redis_server.port}") as driver:
                assert noted(driver, book) == {"orders": 12}
                forget(driver, book)
        finally:
            say(task, "ACL", "DELUSER", "onlooker")
        assert 0 < say(task, "PTTL", book.decode()) <= KEPT_MS


def test_what_a_cap_takes_is_entered_for_each_group(broker):
    broker.xadd_many("capped", [{"event": str(n)} for n in range(50)])
    broker.create_group("capped", "slow", start="0", entries_read=0)
    broker.create_group("capped", "quick", start="$", entries_read=50)
    for expected in (30, 0):
        assert cap(broker, "capped", TrimPolicy(max_len=20)) == expected
    assert broker.run(retention.losses, "capped") == {"slow": 30}


def test_a_name_that_can_have_no_companions_is_capped_all_the_same(broker):
    broker.xadd_many("odd}name", [{"event": str(n)} for n in range(50)])
    broker.create_group("odd}name", "slow", start="0", entries_read=0)
    assert cap(broker, "odd}name", TrimPolicy(max_len=20)) == 30
