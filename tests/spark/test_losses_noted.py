"""Gaps that tasks record for the driver, and losses that the sink records, on redis-server and `millstream serve`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker.scripts import retention
from millstream.model import TrimPolicy
from millstream.spark.data_loss import GAP_RECORD_TTL_MS, delete_gap_record, new_gap_key, record_gap, recorded_gaps
from millstream.spark.fan_out import cap
from millstream.testing.answering import ANSWER_LOST, AnsweringProxy, ProxyAnswer, Request
from millstream.testing.topologies import send_command


@pytest.fixture(params=["redis_server", "millstream_server"])
def broker(request: pytest.FixtureRequest) -> Iterator[BlockingBroker]:
    with open_blocking_broker(request.getfixturevalue(request.param).url) as opened:
        yield opened


def test_recorded_gaps_reach_the_driver_and_expire(broker):
    gap_key = new_gap_key(["orders"])
    assert gap_key is not None
    assert recorded_gaps(broker, gap_key) == {}
    record_gap(broker, gap_key, "orders", None)
    record_gap(broker, gap_key, "orders", 12)
    record_gap(broker, gap_key, "orders", None)
    record_gap(broker, gap_key, "caf\udce9", None)
    assert 0 < send_command(broker, "PTTL", gap_key.decode()) <= GAP_RECORD_TTL_MS
    assert recorded_gaps(broker, gap_key) == {"orders": 12, "caf\udce9": None}
    delete_gap_record(broker, gap_key)
    assert recorded_gaps(broker, gap_key) == {}


def test_recorded_gaps_are_kept_if_a_reply_is_lost(redis_server):
    """The driver repeats the command: the first, lost reply must not be the only one with the gaps."""
    lost: list[bytes] = []

    def each_name_once(request: Request) -> ProxyAnswer | None:
        if request.opening or request.name in lost:
            return None
        lost.append(request.name)
        return ANSWER_LOST

    gap_key = new_gap_key(["orders"])
    assert gap_key is not None
    with open_blocking_broker(redis_server.url) as task:
        record_gap(task, gap_key, "orders", 12)
        with (
            AnsweringProxy(redis_server.port, each_name_once) as proxy,
            open_blocking_broker(f"redis://127.0.0.1:{proxy.port}") as driver,
        ):
            assert recorded_gaps(driver, gap_key) == {"orders": 12}
            delete_gap_record(driver, gap_key)
        assert lost, "no reply was lost"
        assert recorded_gaps(task, gap_key) == {}


def test_driver_without_write_permission_reads_gaps_and_lets_them_expire(redis_server):
    gap_key = new_gap_key(["orders"])
    assert gap_key is not None
    with open_blocking_broker(redis_server.url) as task:
        record_gap(task, gap_key, "orders", 12)
        send_command(task, "ACL", "SETUSER", "readonly", "on", "nopass", "~*", "+@read", "+@connection")
        try:
            with open_blocking_broker(f"redis://readonly:any@127.0.0.1:{redis_server.port}") as driver:
                assert recorded_gaps(driver, gap_key) == {"orders": 12}
                delete_gap_record(driver, gap_key)
        finally:
            send_command(task, "ACL", "DELUSER", "readonly")
        assert 0 < send_command(task, "PTTL", gap_key.decode()) <= GAP_RECORD_TTL_MS


def test_entries_removed_by_a_hard_cap_are_counted_for_each_group(broker):
    broker.xadd_many("capped", [{"event": str(n)} for n in range(50)])
    broker.create_group("capped", "slow", start="0", entries_read=0)
    broker.create_group("capped", "quick", start="$", entries_read=50)
    for expected in (30, 0):
        assert cap(broker, "capped", TrimPolicy(max_len=20)) == expected
    assert broker.run(retention.losses, "capped") == {"slow": 30}


def test_stream_that_cannot_have_companion_keys_is_capped(broker):
    broker.xadd_many("odd}name", [{"event": str(n)} for n in range(50)])
    broker.create_group("odd}name", "slow", start="0", entries_read=0)
    assert cap(broker, "odd}name", TrimPolicy(max_len=20)) == 30
